"""Our own gradient of a step, and groups whose tokens the model itself has sampled: what adapters are compared to."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from hintloop.learner.losses.sdpo import sdpo
from hintloop.learner.rows import hint_context, policy_of
from hintloop.replay.episode import Episode, Outcome

from .factory import make_groups
from .training import logps, train

ALPHA, REPLAY, DPO_BETA = 0.3, 0.7, 0.4


def sampled_groups(model: Any, count: int = 3, size: int = 3) -> list[list[Episode]]:
    """Groups with sites and pairs, one of which has no vote, but sites; recorded log-probabilities are the model's."""
    groups = make_groups(count, size, rewards=(1.0, 0.0, 0.5), sites=2, pairs=1)
    groups += make_groups(1, 2, seed=7, rewards=(None, 1.0), sites=1)
    return [
        [_scored(model, episode, f"{number}") for episode in group] for number, group in enumerate(groups)
    ]


def our_gradient(
    groups: list[list[Episode]], folder: Path, *, model: Any, teacher: Any, reference: Any
) -> torch.Tensor:
    """Of a step at ``model``, which it moves: policy and pairs by the trainer, hints by the sampled-token loss."""
    losses = [_site_losses(model, teacher, episode) for group in groups for episode in group]
    every = torch.cat([loss for found in losses for loss in found])
    (ALPHA * every.mean()).backward()
    hints = gradient(model)
    settings = {"alpha_sdpo": 0, "beta_replay": REPLAY, "dpo_beta": DPO_BETA}
    record = train(model, [groups], folder, reference_model=reference, **settings)
    return hints + record.gradients[0]


def gradient(model: Any) -> torch.Tensor:
    """All of it, in double precision; the model's own is cleared."""
    found = torch.cat([p.grad.flatten().double() for p in model.parameters()])
    model.zero_grad()
    return found


def _scored(model: Any, episode: Episode, group: str) -> Episode:
    with torch.no_grad():
        every = [0.0, *logps(model, list(episode.token_ids)).tolist()]
    logprobs = [value if mask else 0.0 for value, mask in zip(every, episode.loss_mask, strict=True)]
    return replace(
        episode,
        logprobs=logprobs,
        group_id=group,
        episode_id=f"{group}/{episode.episode_id}",
        outcome=Outcome.UNGRADED if episode.reward is None else episode.outcome,
    )


def _site_losses(model: Any, teacher: Any, episode: Episode) -> list[torch.Tensor]:
    policy = policy_of(episode, version=0, max_staleness=None)
    found = []
    for site in episode.hint_sites:
        context = hint_context(episode, site, policy.fresh)
        assert context is not None, "every site here has tokens"
        student = model(input_ids=_row(context.student)).logits[0, context.student_index]
        with torch.no_grad():
            hinted = teacher(input_ids=_row([*context.prompt, *context.hinted])).logits[
                0, context.teacher_index
            ]
        targets = torch.as_tensor(context.targets.copy()).long()
        found.append(sdpo(student, hinted, targets, variant="sampled"))
    return found


def _row(ids: Any) -> torch.Tensor:
    return torch.tensor([[int(i) for i in ids]])
