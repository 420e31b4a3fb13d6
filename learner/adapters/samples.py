"""Episodes as plain token sequences, for trainers that know nothing but tokens, masks and a number per token.

Each channel becomes an advantage A of its tokens. Where the present policy is the one that sampled (or scored)
them, the gradient of ``-A log pi`` is that of the policy loss with the advantage of the group; that of the reverse KL
to a hinted teacher q with ``log q - log pi``, in expectation over the sampled token (Huebotter et al.,
arXiv:2601.20802, prop. 2.1); and that of DPO with ``beta sigmoid(-margin)`` on the chosen tokens and its negative on
the rejected ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hintloop.learner.rows import (
    Bools,
    Floats,
    HintContext,
    Ints,
    PairContext,
    Policy,
    group_advantages,
    hint_context,
    pair_context,
    policy_of,
)
from hintloop.replay.episode import Episode, Outcome

Score = Callable[[Ints], Floats]
"""Log-probabilities in nats of the tokens of a sequence, each given those before it; of the first, anything."""

NO_HINT = 0.0
"""What a stream of teacher log-probabilities has where there is no hint; also what trainers pad such streams with."""
LARGEST_LOGPROB = -1e-7
"""A teacher that is certain counts as this sure, so that it is not taken for the absence of a hint."""


@dataclass(frozen=True, slots=True)
class Sample:
    """An episode, with what its tokens are worth; arrays of its length."""

    episode_id: str
    group_id: str
    env: str
    ids: Ints
    trained: Bools
    """Sampled tokens with a recorded log-probability; without a vote, those that a hint is compared at."""
    logprobs: Floats
    """Recorded by the policy that sampled; 0 off the trained tokens."""
    reward: float | None
    advantage: float | None
    """Within the group; None without a vote."""
    sites: tuple[HintContext, ...]
    """With compared tokens that are trained."""
    pairs: tuple[PairContext, ...]

    @property
    def hinted(self) -> Bools:
        """The compared tokens."""
        return _marked(len(self.ids), self.sites)


def samples_of(
    groups: Sequence[Sequence[Episode]], *, version: int = 0, max_staleness: int | None = None
) -> list[Sample]:
    """Samples of whole groups for weights of ``version``, in order, without those that neither vote nor train.

    What the learner must not train on is left out here too: broken, held-out and empty episodes. So are hint
    tokens whose log-probability nobody recorded (foreign traces): these trainers divide by it.
    """
    samples: list[Sample] = []
    for group in groups:
        usable = [e for e in group if _usable(e)]
        for episode, advantage in zip(usable, group_advantages([e.reward for e in usable]), strict=True):
            policy = policy_of(episode, version=version, max_staleness=max_staleness)
            sample = _sample(episode, advantage, policy)
            if advantage is not None or sample.trained.any() or sample.pairs:
                samples.append(sample)
    return samples


def teacher_stream(sample: Sample, teacher: Score) -> Floats:
    """The teacher's log-probability of each compared token behind the hint, and ``NO_HINT`` elsewhere.

    ``ValueError`` when two hints are compared at one token: a stream has room for one.
    """
    stream = np.full(len(sample.ids), NO_HINT, dtype=np.float32)
    for site in sample.sites:
        at = site.student_index + 1
        if (stream[at] != NO_HINT).any():
            raise ValueError(f"{sample.episode_id}: two hints are compared at one token")
        scored = teacher(np.concatenate([site.prompt, site.hinted]))
        stream[at] = np.minimum(scored[site.teacher_index + 1], LARGEST_LOGPROB)
    return stream


def pair_weights(margins: Floats, beta: float) -> Floats:
    """``beta sigmoid(-beta margin)``: how hard DPO pulls the two responses of each pair apart.

    ``margins`` (P,), in nats: by how much the policy prefers the chosen response, beyond the reference.
    """
    weights: Floats = beta * np.exp(-np.logaddexp(0.0, beta * margins))
    return weights


def model_score(model: Any) -> Score:
    """Scores by a Hugging Face causal language model in this process, one sequence at a time, without gradient."""

    def score(ids: Ints) -> Floats:
        tokens = torch.as_tensor(ids.astype(np.int64), device=model.device)[None]
        with torch.no_grad():
            every = model(input_ids=tokens, use_cache=False).logits[0, :-1].float().log_softmax(-1)
        found = every.gather(-1, tokens[0, 1:, None])[:, 0]
        return np.concatenate([np.zeros(1, np.float32), found.cpu().numpy()])

    return score


def _usable(episode: Episode) -> bool:
    return (
        episode.outcome is not Outcome.INFRA_ERROR
        and episode.source != "evaluation"
        and bool(episode.token_ids)
    )


def _sample(episode: Episode, advantage: float | None, policy: Policy) -> Sample:
    found = [hint_context(episode, site, policy.scored, policy.ids) for site in episode.hint_sites]
    sites = tuple(site for site in found if site is not None)
    pairs = (pair_context(episode, pair, policy.ids) for pair in episode.pairs)
    trained = _marked(len(policy.ids), sites) if advantage is None else policy.scored
    return Sample(
        episode_id=episode.episode_id,
        group_id=episode.group_id,
        env=episode.env,
        ids=policy.ids,
        trained=trained,
        logprobs=np.where(trained, policy.logprobs, np.float32(0.0)),
        reward=episode.reward,
        advantage=advantage,
        sites=sites,
        pairs=tuple(pair for pair in pairs if pair is not None),
    )


def _marked(length: int, sites: Sequence[HintContext]) -> Bools:
    marked = np.zeros(length, dtype=np.bool_)
    for site in sites:
        marked[site.student_index + 1] = True
    return marked
