"""PRIME-RL: its custom loss with a hint channel, and episodes as what its trainer takes.

In its configuration::

    [trainer.loss]
    type = "custom"
    import_path = "hintloop.learner.adapters.prime_rl.loss_fn"
    kwargs = { alpha_sdpo = 0.1 }

Nothing here imports it, so the loss also runs without it, on ``LossInputs`` of this module.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args

import numpy as np
import torch
from torch import Tensor

from hintloop.learner.adapters.samples import (
    NO_HINT,
    Sample,
    Score,
    pair_weights,
    samples_of,
    teacher_stream,
)
from hintloop.learner.rows import Floats, Ints, PairContext
from hintloop.replay.episode import Episode

Formula = Literal["current", "v0.5"]


class Inputs(Protocol):
    """What a loss function is given of one sequence: (T,) tensors. The attributes of ``LossInputs`` that a release
    does not have yet are read where they exist."""

    trainer_logprobs: Tensor
    inference_logprobs: Tensor
    advantages: Tensor
    loss_mask: Tensor


@dataclass
class LossInputs:
    """PRIME-RL's class of this name, for use without it: (T,) tensors of one sequence, log-probabilities in nats."""

    trainer_logprobs: Tensor
    """Of the policy that is trained; with gradient."""
    inference_logprobs: Tensor
    """Of the policy that sampled."""
    ref_logprobs: Tensor | None
    """Of the hinted teacher, and 0 where there is no hint. Called ``teacher_logprobs`` before version 0.7."""
    advantages: Tensor
    loss_mask: Tensor
    """Boolean: True where a token is trained."""
    loss_weights: Tensor | None = None


@dataclass
class LossOutputs:
    """PRIME-RL's class of this name, for use without it."""

    loss: Tensor
    """Sum over the tokens, with gradient; the trainer divides by the tokens of the step."""
    metrics: dict[str, Tensor]


def loss_fn(
    inputs: Inputs,
    *,
    formula: Formula = "current",
    dppo_mask_low: float = 0.2,
    dppo_mask_high: float = 0.2,
    adv_tau: float = 1.0,
    kl_tau: float = 1e-3,
    alpha_sdpo: float = 0.1,
) -> Any:
    """PRIME-RL's own policy loss of one sequence plus ``alpha_sdpo`` times the hint channel, as its ``LossOutputs``.

    With r = pi / mu of a token, moved = pi - mu (probabilities) and gap = log q - log pi without gradient, where the
    reference log-probability log q is not 0::

        sum over loss_mask of weight * [ -(keep adv_tau A + keep_hint alpha_sdpo gap) r + kl_tau (log r)^2 ]

    "current", the default loss since 0.6: ``keep`` is not moved > high where A > 0, else not moved < -low, and
    ``keep_hint`` is not moved < -low, as in their reference-KL component. "v0.5": ``keep`` is -low <= moved <= high
    whatever the sign of A, for both; ``alpha_sdpo`` is then their ``teacher_tau``, on the hinted tokens only.

    Untrained positions may hold anything. The class of the result is the one that lies beside the class of
    ``inputs``. Source: the public code of PRIME-RL at v0.5.0, v0.6.0 to v0.8.0 and commit 559b447; DPPO,
    arXiv:2602.04879. ``ValueError`` for an unknown formula.
    """
    if formula not in get_args(Formula):
        raise ValueError(f"formula must be one of {get_args(Formula)}, not {formula!r}")
    mask = inputs.loss_mask
    logps, old, advantages = (
        values[mask] for values in (inputs.trainer_logprobs, inputs.inference_logprobs, inputs.advantages)
    )
    moved = (logps.exp() - old.exp()).detach()
    low, high = moved < -dppo_mask_low, moved > dppo_mask_high
    dropped = low | high if formula == "v0.5" else torch.where(advantages > 0, high, low)
    hint_dropped = dropped if formula == "v0.5" else low
    gap, hinted = _gap(_stream(inputs, "ref_logprobs", "teacher_logprobs"), mask, logps.detach())
    log_ratio = logps - old
    ratio = log_ratio.exp()
    signal = adv_tau * advantages * ~dropped + alpha_sdpo * gap * ~hint_dropped
    losses = -signal * ratio + kl_tau * log_ratio**2
    weights = _stream(inputs, "loss_weights")
    losses = losses if weights is None else losses * weights[mask]
    mismatch = (ratio - log_ratio - 1.0).detach()
    metrics = {
        "masked_mismatch_kl": _mean(mismatch, dropped),
        "unmasked_mismatch_kl": _mean(mismatch, ~dropped),
        "is_masked": dropped.sum() / max(1, dropped.numel()),
        "hint/tokens": hinted.sum().float(),
        "hint/gap": _mean(gap, hinted),
    }
    return getattr(sys.modules[type(inputs).__module__], "LossOutputs", LossOutputs)(losses.sum(), metrics)


def training_samples(
    groups: Sequence[Sequence[Episode]],
    *,
    teacher: Score | None = None,
    policy: Score | None = None,
    reference: Score | None = None,
    ref_kl_weight: float = 0.0,
    beta_replay: float = 0.1,
    dpo_beta: float = 0.1,
    temperature: float = 1.0,
    version: int = 0,
    max_staleness: int | None = None,
) -> list[dict[str, Any]]:
    """The step that whole groups make, as fields of PRIME-RL's ``TrainingSample``, one dictionary a sequence.

    ``teacher`` scores hinted contexts; its log-probabilities ride in ``ref_logprobs``, which ``loss_fn`` reads. A
    ``ref_kl_weight`` above 0 gives the same tokens to PRIME-RL's own component instead, which divides by their
    number: the weight is then what ``learner.alpha_sdpo`` is here, and that of ``loss_fn`` has to be 0.

    With ``policy`` and ``reference`` both, the responses of pairs are two more sequences each, whose advantages
    have the gradient of DPO at the weights that ``policy`` scored with. Advantages are scaled so that the policy
    loss and the pairs keep their own denominators, though the trainer divides by the tokens of all these sequences.

    No teacher, no hints; neither of the other two, no pairs. ``ValueError`` for one without the other.
    """
    if (policy is None) != (reference is None):
        raise ValueError("pairs need the policy and the reference, or neither")
    samples = samples_of(groups, version=version, max_staleness=max_staleness)
    pairs = [(s, pair) for s in samples for pair in s.pairs] if policy and beta_replay else []
    voting = sum(int(s.trained.sum()) for s in samples if s.advantage is not None)
    tokens = sum(int(s.trained.sum()) for s in samples) + sum(len(r) for _, p in pairs for r in p.responses)
    fields = []
    for sample in samples:
        if sample.trained.any():
            advantage = (sample.advantage or 0.0) * tokens / max(1, voting)
            fields.append(
                _fields(sample, sample.ids, sample.trained, sample.logprobs, advantage, temperature)
            )
            if teacher and sample.sites:
                fields[-1] |= _reference(teacher_stream(sample, teacher), ref_kl_weight)
    if policy and reference:
        scale = beta_replay * tokens / max(1, len(pairs))
        for sample, pair in pairs:
            for ids, trained, scored, weight in _sides(pair, policy, reference, dpo_beta):
                fields.append(_fields(sample, ids, trained, scored, scale * weight, temperature))
    return fields


def _stream(inputs: Inputs, *names: str) -> Tensor | None:
    """The first of these attributes that there is."""
    found = (getattr(inputs, name, None) for name in names)
    return next((stream for stream in found if stream is not None), None)


def _gap(teacher: Tensor | None, mask: Tensor, logps: Tensor) -> tuple[Tensor, Tensor]:
    """``log q - log pi`` of the trained tokens, 0 where there is no hint, and where there is one."""
    if teacher is None:
        return torch.zeros_like(logps), torch.zeros_like(logps, dtype=torch.bool)
    hinted = teacher[mask] != NO_HINT
    return (teacher[mask] - logps).where(hinted, 0.0), hinted


def _mean(values: Tensor, mask: Tensor) -> Tensor:
    return values[mask].sum() / mask.sum().clamp(min=1)


def _fields(
    sample: Sample, ids: Ints, trained: Any, logprobs: Floats, advantage: float, temperature: float
) -> dict[str, Any]:
    return {
        "token_ids": ids.tolist(),
        "mask": trained.tolist(),
        "logprobs": logprobs.tolist(),
        "temperatures": [temperature] * len(ids),
        "env_name": sample.env,
        "advantages": np.where(trained, advantage, 0.0).tolist(),
    }


def _reference(stream: Floats, weight: float) -> dict[str, Any]:
    fields: dict[str, Any] = {"ref_logprobs": stream.tolist()}
    return fields | ({"ref_kl_weights": np.where(stream != NO_HINT, weight, 0.0).tolist()} if weight else {})


def _sides(
    pair: PairContext, policy: Score, reference: Score, beta: float
) -> Iterator[tuple[Ints, Any, Floats, float]]:
    """Tokens, mask, log-probabilities and advantage of the chosen response, then of the rejected one."""
    start = len(pair.prompt)
    sides = [np.concatenate([pair.prompt, response]) for response in pair.responses]
    scored = [policy(ids) for ids in sides]
    beyond = [float((ours - reference(ids))[start:].sum()) for ours, ids in zip(scored, sides, strict=True)]
    weight = float(pair_weights(np.array(beyond[0] - beyond[1]), beta))
    for ids, ours, sign in zip(sides, scored, (1.0, -1.0), strict=True):
        trained = np.arange(len(ids)) >= start
        yield ids, trained, np.where(trained, ours, np.float32(0.0)), sign * weight
