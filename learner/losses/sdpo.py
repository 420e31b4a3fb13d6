"""Self-distillation policy optimisation: the policy learns from itself under a richer context.

Its loss is a divergence per token times weights that carry no gradient: the importance ratio to the policy that
sampled, a correction for the rollout engine, and a gate by how much the teacher likes the sampled token.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from hintloop.learner.losses.divergence import generalized_jsd, require_settings
from hintloop.learner.losses.head import Head
from hintloop.learner.losses.reduction import ReductionName, TokenReduction, full_precision, require_logits
from hintloop.learner.losses.topk import TopK

LARGEST_LOG_RATIO = 20.0
"""Nats: importance ratios are held between exp of minus this and exp of this."""


def sdpo(
    student_logits: Tensor,
    teacher_logits: Tensor,
    tokens: Tensor | None = None,
    *,
    variant: Literal["full", "topk", "sampled"],
    beta: float = 1.0,
    temperature: float = 1.0,
    k: int | None = None,
    tail: bool = True,
    old_logprobs: Tensor | None = None,
    ratio_clip: float = 2.0,
    weights: Tensor | None = None,
    gate_sharpness: float | None = None,
    mask: Tensor | None = None,
    reduction: ReductionName = "none",
    denominator: float | None = None,
) -> Tensor:
    """Loss of ``(..., V)`` logits for sampled ``tokens`` (...): (...) in nats, or a scalar.

    ``variant``:

    - "full": ``generalized_jsd`` over the vocabulary.
    - "topk": the same over the student's ``k`` likeliest entries, with or without a ``tail`` bin.
    - "sampled": ``sampled_token_divergence``; its value means nothing, its gradient is that of beta = 1, the
      only one it takes.

    Each token's loss is multiplied by ``importance_weights`` up to ``ratio_clip`` where ``old_logprobs`` (...)
    are given, by ``weights`` (...), and by ``gap_gate`` where ``gate_sharpness`` is given. All log-probabilities
    here are at ``temperature``: ratios to log-probabilities of another temperature are the caller's to compute
    and to pass as ``weights``. ``mask``, ``reduction`` and ``denominator`` are those of ``TokenReduction``;
    masked positions may hold anything, in ``tokens`` too.

    Source: Huebotter et al., arXiv:2601.20802, eq. 1 and its public code. The mean over all trained tokens is
    theirs; TRL instead averages means over rows. ``ValueError`` for an unknown variant, a ``k`` that is missing
    or not used, absent tokens, and what ``generalized_jsd`` refuses.
    """
    _require_variant(variant, beta, k)
    require_settings(beta, temperature)
    require_logits(student_logits, teacher_logits)
    trained = TokenReduction(student_logits.shape[:-1], mask, reduction, denominator)
    student, teacher = trained.rows(student_logits), trained.rows(teacher_logits.detach())
    factors = [] if weights is None else [trained.scalars(weights.detach(), "weights")]
    if variant == "sampled" or old_logprobs is not None or gate_sharpness is not None:
        if tokens is None:
            raise ValueError("the sampled variant, the importance ratio and the gate need the sampled tokens")
        sampled = trained.scalars(tokens, "tokens")
        learner = student if variant == "sampled" else student.detach()  # the weights need no graph
        log_s, log_t = (token_logprobs(x, sampled, temperature=temperature) for x in (learner, teacher))
        if old_logprobs is not None:
            old = trained.scalars(old_logprobs, "old_logprobs")
            factors.append(importance_weights(log_s, old, clip=ratio_clip))
        if gate_sharpness is not None:
            factors.append(gap_gate(log_s, log_t, sharpness=gate_sharpness))
    if variant == "sampled":
        losses = sampled_token_divergence(log_s, log_t)
    else:
        top_k = None if k is None else TopK(k, "student", tail)
        losses = generalized_jsd(student, teacher, beta=beta, temperature=temperature, top_k=top_k)
    for factor in factors:
        losses = losses * factor
    return trained.reduce(losses)


def token_logprobs(logits: Tensor, tokens: Tensor, *, temperature: float = 1.0) -> Tensor:
    """Log-probability (...) in nats of each of ``tokens`` (...) under the tempered ``(..., V)`` logits."""
    tempered = full_precision(logits) / temperature
    return tempered.gather(-1, tokens.unsqueeze(-1)).squeeze(-1) - tempered.logsumexp(-1)


def sampled_token_divergence(student_logprobs: Tensor, teacher_logprobs: Tensor) -> Tensor:
    """``sg(log pi - log q) * log pi`` of the sampled tokens, (...) from two (...).

    Over tokens that the student samples, the expected gradient is that of KL(pi || q); the value is not that
    divergence. The student's log-probabilities from hidden states are those of ``Head.logprobs``.
    Source: Huebotter et al., arXiv:2601.20802, prop. 2.1. ``ValueError`` when the shapes differ.
    """
    _require_same(student_logprobs, teacher_logprobs)
    return (student_logprobs - teacher_logprobs).detach() * student_logprobs


def importance_weights(logprobs: Tensor, old_logprobs: Tensor, *, clip: float = 2.0) -> Tensor:
    """``min(pi / pi_old, clip)`` per sampled token, (...) from two (...) in nats, without gradient.

    The log-ratio is held within 20 nats, so the weight is between exp(-20) and ``clip``. Source: the public code
    of Huebotter et al., arXiv:2601.20802. ``ValueError`` when the shapes differ or ``clip`` is not positive.
    """
    _require_same(logprobs, old_logprobs)
    if not clip > 0.0:
        raise ValueError(f"the clip of the ratio must be positive, not {clip}")
    log_ratio = (logprobs - old_logprobs).detach().clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
    return log_ratio.exp().clamp(max=clip)


def gap_gate(student_logprobs: Tensor, teacher_logprobs: Tensor, *, sharpness: float = 5.0) -> Tensor:
    """``sigmoid(sharpness * (log q - log pi))`` of the sampled tokens, (...) from two (...), without gradient.

    Near 1 where the teacher endorses what was sampled, near 0 where it rejects it (the rejection may be a
    fault of the hint), 1/2 where they agree. The gate and its sharpness are those of SDAR, Lu et al.,
    arXiv:2605.15155. What it multiplies is not: their code, as found in a public fork, minimises the gate times
    ``log q - log pi`` of the sampled token, whose gradient raises every sampled token, also without any hint.
    Here it multiplies a divergence, which is 0 without a hint. At a failing action, where the teacher is to
    reject what was sampled, a sharp gate removes the lesson itself.
    ``ValueError`` when the shapes differ or the sharpness is negative or infinite.
    """
    _require_same(student_logprobs, teacher_logprobs)
    if not 0.0 <= sharpness < math.inf:
        raise ValueError(f"sharpness must be finite and not negative, not {sharpness}")
    return torch.sigmoid(sharpness * (teacher_logprobs - student_logprobs).detach())


def trust_region_logits(reference_logits: Tensor, student_logits: Tensor, u: float) -> Tensor:
    """Logits of the teacher ``q ~ reference^(1-u) * student^u``, as both ``(..., V)``, without gradient.

    ``u`` = 0 is the reference and 1 the student. Half precision is raised to fp32. Source: Huebotter et al.,
    arXiv:2601.20802, the trust-region teacher. ``ValueError`` when the shapes differ or u is outside [0, 1].
    """
    _require_same(reference_logits, student_logits)
    if not 0.0 <= u <= 1.0:
        raise ValueError(f"u must be in [0, 1], not {u}")
    return torch.lerp(full_precision(reference_logits.detach()), full_precision(student_logits.detach()), u)


def trust_region(
    reference: Tensor, reference_head: Head, student: Tensor, student_head: Head, u: float
) -> tuple[Tensor, Head]:
    """``trust_region_logits`` as states ``(K, H + H')`` and the head that gives these logits of them.

    From states ``(K, H)`` of the reference and ``(K, H')`` of the student, each with its head, so that the logits
    need not exist. ``ValueError`` for heads with a soft cap, of which no sum is a head, and u outside [0, 1].
    """
    if reference_head.softcap is not None or student_head.softcap is not None:
        raise ValueError("a trust-region teacher needs heads without a soft cap on their logits")
    if not 0.0 <= u <= 1.0:
        raise ValueError(f"u must be in [0, 1], not {u}")
    parts = ((reference_head, 1.0 - u), (student_head, u))
    weight = torch.cat([head.weight.detach() * (head.scale * share) for head, share in parts], dim=1)
    biases = [head.bias.detach() * (head.scale * share) for head, share in parts if head.bias is not None]
    bias = torch.stack(biases).sum(0) if biases else None
    return torch.cat([reference, student], dim=-1).detach(), Head(weight, bias)


def _require_same(one: Tensor, other: Tensor) -> None:
    if one.shape != other.shape:
        raise ValueError(f"need two tensors of one shape, not {tuple(one.shape)} and {tuple(other.shape)}")


def _require_variant(variant: str, beta: float, k: int | None) -> None:
    if variant not in ("full", "topk", "sampled"):
        raise ValueError(f"variant must be 'full', 'topk' or 'sampled', not {variant!r}")
    if (k is None) == (variant == "topk"):
        raise ValueError(f"k is for the variant 'topk', which needs it: not k = {k} with {variant!r}")
    if variant == "sampled" and beta != 1.0:
        raise ValueError(f"the variant 'sampled' needs beta = 1, not {beta}")
