"""Weights for tokens that another policy sampled than the one that learns from them."""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from torch import Tensor

from hintloop.learner.losses.reduction import TokenReduction

Correction = Literal["none", "tis", "icepop", "sequence_mask"]


def correction_weights(
    kind: Correction,
    logprobs: Tensor,
    sampler_logprobs: Tensor,
    *,
    mask: Tensor,
    cap: float = 2.0,
    low: float = 0.5,
    high: float = 5.0,
    delta: float | None = None,
    advantages: Tensor | None = None,
) -> tuple[Tensor, float]:
    """What to multiply each token's loss by, and the share of the trained tokens that is dropped by it.

    ``logprobs`` and ``sampler_logprobs`` (...) are those of the sampled tokens, in nats, under the learner's
    policy pi and under the policy mu that sampled. With rho = pi / mu, ``kind`` is one of:

    - "none": 1.
    - "tis", truncated importance sampling: ``min(rho, cap)``. Drops nothing. Source: public code of verl
      (``rollout_is_threshold``) and slime (``tis_clip``), both 2 by default.
    - "icepop": rho where ``low <= rho <= high``, else 0. Source: public code of slime (``icepop_function``); the
      bounds are those of verl.
    - "sequence_mask": 0 for all tokens of a row with a negative advantage and a mean of log mu - log pi over its
      trained tokens above ``delta``, else 1. Needs ``(B, T)`` log-probabilities, ``advantages`` (B,) and a
      ``delta`` in nats. Source: DeepSeek-V3.2, arXiv:2512.02556; ``off_policy_mask_threshold`` in TRL.

    The weights (...) carry no gradient and are 0 where ``mask`` (...), which is boolean, is not True; what the
    log-probabilities are there is never read. Without trained tokens the share is 0.

    ``ValueError`` for an unknown kind, shapes that do not match, a mask that is missing or not boolean, a trained
    token that the sampler gave no number for (NaN), bounds without a meaning, and a "sequence_mask" that lacks
    what it needs.
    """
    if kind not in get_args(Correction):
        raise ValueError(f"the correction must be one of {get_args(Correction)}, not {kind!r}")
    trained = TokenReduction(logprobs.shape, mask, "sum")
    learner = trained.scalars(logprobs.detach(), "logprobs")
    sampler = trained.scalars(sampler_logprobs.detach(), "sampler_logprobs")
    if bool(sampler.isnan().any()):
        raise ValueError("a trained token has no log-probability under the policy that sampled it (NaN)")
    log_ratio = learner - sampler
    if kind == "none":
        weights = torch.ones_like(log_ratio)
    elif kind == "tis":
        weights = _truncated(log_ratio, cap)
    elif kind == "icepop":
        weights = _within(log_ratio, low, high)
    else:
        weights = _of_kept_rows(log_ratio, mask, delta, advantages)
    dropped = int((weights == 0).sum()) if kind in ("icepop", "sequence_mask") else 0
    placed = log_ratio.new_zeros(mask.shape).masked_scatter(mask, weights)
    return placed, dropped / max(1, len(weights))


def _truncated(log_ratio: Tensor, cap: float) -> Tensor:
    if not 0.0 < cap < math.inf:
        raise ValueError(f"cap must be positive and finite, not {cap}")
    return log_ratio.exp().clamp(max=cap)


def _within(log_ratio: Tensor, low: float, high: float) -> Tensor:
    if not 0.0 <= low <= high < math.inf:
        raise ValueError(f"need 0 <= low <= high, both finite, not {low} and {high}")
    ratio = log_ratio.exp()
    return ratio.where((ratio >= low) & (ratio <= high), 0.0)


def _of_kept_rows(log_ratio: Tensor, mask: Tensor, delta: float | None, advantages: Tensor | None) -> Tensor:
    if delta is None or math.isnan(delta):
        raise ValueError(f"sequence_mask needs a delta in nats, not {delta}")
    if advantages is None or mask.ndim != 2 or advantages.shape != mask.shape[:1]:
        given = None if advantages is None else tuple(advantages.shape)
        raise ValueError(
            f"sequence_mask needs (B, T) and advantages (B,), not {tuple(mask.shape)} and {given}"
        )
    rows = mask.nonzero()[:, 0]
    sums = log_ratio.new_zeros(len(mask)).index_add(0, rows, -log_ratio)
    drift = sums / mask.sum(-1).clamp(min=1)
    kept = ~((advantages < 0) & (drift > delta))
    return kept.to(log_ratio.dtype)[rows]
