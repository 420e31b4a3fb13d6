"""Generalised Jensen-Shannon divergence between a student and a teacher, from logits or from hidden states.

Both models predict the same token, each in its own sequence. From hidden states, those of just these positions
are gathered before the vocabulary projection, so B x T x V logits never exist.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from trl.kernels.chunked_divergence import ChunkedDivergenceFunction

from hintloop.learner.losses.head import Head
from hintloop.learner.losses.reduction import ReductionName, TokenReduction, full_precision, require_logits
from hintloop.learner.losses.topk import TopK, on_support

DENSE_ELEMENTS = 1 << 24
"""Positions times vocabulary above which the divergence is computed in tiles (64 MiB of fp32 logits)."""


def generalized_jsd(
    student_logits: Tensor,
    teacher_logits: Tensor,
    *,
    beta: float,
    temperature: float = 1.0,
    top_k: TopK | None = None,
    clip: float | None = None,
    weights: Tensor | None = None,
    mask: Tensor | None = None,
    reduction: ReductionName = "none",
    denominator: float | None = None,
) -> Tensor:
    """Divergence per position, in nats, of two ``(..., V)`` logits; no gradient to the teacher.

    With S, T the tempered distributions and M = (1-beta) S + beta T::

        beta = 0:      KL(T || S)
        beta = 1:      KL(S || T)
        0 < beta < 1:  beta KL(T || M) + (1-beta) KL(S || M)

    The end points are not limits: the middle form goes to 0 as beta goes to 0 or 1, and near agreement the one
    at 1/2 is a quarter of either end. Temperature divides both logits and nothing is multiplied by its square.
    Half-precision logits are raised to fp32.

    ``top_k`` restricts both distributions to some entries. ``clip`` (nats) scales a position's divergence d, once
    summed over the vocabulary, by ``min(1, clip / d)`` without gradient: it bounds what a position counts for
    and keeps its direction, where a clamp would drop the positions that are furthest off. ``weights`` (...)
    multiply the result, without gradient. Then ``mask`` (...), ``reduction`` and ``denominator`` are those of
    ``TokenReduction``; the result is (...) for "none" and a scalar otherwise.

    Source: Agarwal et al., arXiv:2306.13649, eq. 1. ``ValueError`` for shapes that do not match, a beta outside
    [0, 1], a temperature or clip that is not positive, or a k above V.
    """
    require_settings(beta, temperature, clip)
    require_logits(student_logits, teacher_logits)
    tokens = TokenReduction(student_logits.shape[:-1], mask, reduction, denominator)
    student, teacher = tokens.rows(student_logits), tokens.rows(teacher_logits.detach())
    divergence = _divergence(student, teacher, beta, temperature, top_k)
    return tokens.reduce(_weighted(divergence, clip, weights, tokens))


def fused_generalized_jsd(
    student: Tensor,
    teacher: Tensor,
    student_head: Head,
    teacher_head: Head,
    *,
    beta: float,
    temperature: float = 1.0,
    top_k: TopK | None = None,
    clip: float | None = None,
    weights: Tensor | None = None,
    mask: Tensor | None = None,
    reduction: ReductionName = "none",
    denominator: float | None = None,
) -> Tensor:
    """``generalized_jsd`` from hidden states ``(..., H)`` and ``(..., H')``, with the same options and result.

    Dense while trained positions times V are few, and beyond that in tiles which the backward pass computes
    again: over positions and vocabulary for the full distribution, over positions with a ``top_k`` (there each
    tile has a gradient of the whole head, so tiles save memory with a frozen head or very many positions). Without
    positions the result is empty, and its sum is 0 and still attached to the student. ``ValueError`` as there,
    and for heads of different vocabularies.
    """
    require_settings(beta, temperature, clip)
    vocabulary = student_head.weight.shape[0]
    if teacher_head.weight.shape[0] != vocabulary:
        raise ValueError(f"need one vocabulary, not {vocabulary} and {teacher_head.weight.shape[0]} entries")
    if student.ndim < 2 or student.shape[:-1] != teacher.shape[:-1]:
        raise ValueError(
            "need states (..., H) and (..., H') of the same positions, "
            f"not {tuple(student.shape)} and {tuple(teacher.shape)}"
        )
    tokens = TokenReduction(student.shape[:-1], mask, reduction, denominator)
    rows, teacher_rows = tokens.rows(student), tokens.rows(teacher.detach())

    def dense(rows: Tensor, teacher_rows: Tensor) -> Tensor:
        with torch.no_grad():
            target = teacher_head.logits(teacher_rows)
        return _divergence(student_head.logits(rows), target, beta, temperature, top_k)

    if len(rows) * vocabulary <= DENSE_ELEMENTS:
        divergence = dense(rows, teacher_rows)
    elif top_k is None:
        divergence = _kernel(rows, teacher_rows, student_head, teacher_head, beta, temperature)
    else:
        size = max(1, DENSE_ELEMENTS // vocabulary)
        tiles = [slice(start, start + size) for start in range(0, len(rows), size)]
        parts = [_recomputed(dense, rows[tile], teacher_rows[tile]) for tile in tiles]
        divergence = torch.cat(parts)
    return tokens.reduce(_weighted(divergence, clip, weights, tokens))


def require_settings(beta: float, temperature: float, clip: float | None = None) -> None:
    """``ValueError`` for settings without a meaning."""
    if not 0.0 <= beta <= 1.0:
        raise ValueError(f"beta must be in [0, 1], not {beta}")
    if not 0.0 < temperature < math.inf:
        raise ValueError(f"temperature must be positive and finite, not {temperature}")
    if clip is not None and not 0.0 < clip < math.inf:
        raise ValueError(f"clip must be positive and finite, not {clip}")


def _recomputed(function: Callable[[Tensor, Tensor], Tensor], *rows: Tensor) -> Tensor:
    result: Tensor = checkpoint(function, *rows, use_reentrant=False, preserve_rng_state=False)
    return result


def _kernel(
    student: Tensor, teacher: Tensor, student_head: Head, teacher_head: Head, beta: float, temperature: float
) -> Tensor:
    divergence: Tensor = ChunkedDivergenceFunction.apply(  # type: ignore[no-untyped-call]
        student,
        student_head.weight,
        student_head.bias,
        teacher,
        teacher_head.weight,
        teacher_head.bias,
        beta,
        temperature,
        student_head.scale,
        student_head.softcap,
        teacher_head.scale,
        teacher_head.softcap,
    )[0]
    return divergence


def _divergence(
    student_logits: Tensor, teacher_logits: Tensor, beta: float, temperature: float, top_k: TopK | None
) -> Tensor:
    log_s = F.log_softmax(full_precision(student_logits) / temperature, dim=-1)
    log_t = F.log_softmax(full_precision(teacher_logits) / temperature, dim=-1)
    if top_k is not None:
        log_s, log_t = on_support(log_s, log_t, top_k)
    if beta == 0.0:
        return _kl(log_t, log_s)
    if beta == 1.0:
        return _kl(log_s, log_t)
    log_m = torch.logaddexp(log_s + math.log1p(-beta), log_t + math.log(beta))
    return beta * _kl(log_t, log_m) + (1.0 - beta) * _kl(log_s, log_m)


def _weighted(
    divergence: Tensor, clip: float | None, weights: Tensor | None, tokens: TokenReduction
) -> Tensor:
    if clip is not None:
        divergence = divergence * (clip / divergence.detach().clamp(min=clip))
    return divergence if weights is None else divergence * tokens.scalars(weights.detach(), "weights")


def _kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    return (log_p.exp() * (log_p - log_q)).sum(-1)
