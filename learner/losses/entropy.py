"""Two distillation losses that depend on how sure the teacher is, token by token."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from hintloop.learner.losses.divergence import generalized_jsd
from hintloop.learner.losses.reduction import TokenReduction, full_precision, require_logits


@dataclass(frozen=True, slots=True)
class EntropyAware:
    """Result of ``entropy_aware_opd``."""

    loss: Tensor
    """Scalar in nats, with gradient."""
    tokens: int
    """Trained tokens."""
    gated: int
    """Those with the divergence term: the teacher is unsure there."""
    negative: int
    """Those of the gated ones whose truncated divergence is negative."""

    @property
    def gated_share(self) -> float:
        """Of the trained tokens; 0 without any."""
        return self.gated / max(1, self.tokens)

    @property
    def negative_share(self) -> float:
        """Of the gated tokens; 0 without any."""
        return self.negative / max(1, self.gated)


def teacher_entropy(teacher_logits: Tensor) -> Tensor:
    """Entropy (...) in nats of ``(..., V)`` logits, without gradient; half precision is raised to fp32."""
    entropy: Tensor = torch.special.entr(full_precision(teacher_logits.detach()).softmax(-1)).sum(-1)
    return entropy


def entropy_aware_opd(
    student_logits: Tensor,
    teacher_logits: Tensor,
    tokens: Tensor,
    old_logprobs: Tensor,
    *,
    mask: Tensor,
    tau: float = 0.8,
    alpha: float = 1.0,
    k: int = 16,
    epsilon: float = 0.2,
    denominator: float | None = None,
) -> EntropyAware:
    """On-policy distillation of sampled tokens, plus a forward divergence where the teacher is unsure.

    For ``(..., V)`` logits of student S and teacher T, sampled ``tokens`` y (...) and the log-probabilities
    ``old_logprobs`` (...) in nats of the policy that sampled them, with H the teacher's entropy over the whole
    vocabulary, the sums over trained positions and the inner sum over the teacher's ``k`` likeliest entries::

        r = S(y) / old(y),  A = sg(log T(y) - log old(y))
        loss = sum of max(-A r, -A clip(r, 1 - epsilon, 1 + epsilon)) / denominator
             + alpha sum of [H >= tau] sum of T(v) log(T(v) / S(v)) / denominator

    Both terms are divided by all trained tokens, gated or not. The inner sum is neither renormalised nor clamped,
    so it is no divergence and can be negative, where S holds more mass on these entries than T: watch
    ``negative_share``. ``tau`` is in nats, whatever the vocabulary; infinity leaves the first term only, 0 gates
    nothing. All log-probabilities are of one temperature, which the logits have been divided by already.

    ``mask`` (...) is boolean, True where a token is trained; what is elsewhere is never read. ``denominator`` is
    the number of trained tokens of the whole step where this is a part of one, and by default that of the mask;
    without trained tokens the loss is exactly 0 and attached to the graph. No gradient reaches the teacher.

    Source: EOPD, arXiv:2603.07079, with its defaults, as found in a public fork of its code. ``ValueError`` for
    shapes that do not match, a mask that is missing or not boolean, a k outside [1, V], a negative tau or alpha,
    and an epsilon that is not positive.
    """
    _require_settings(tau, alpha, k, epsilon, student_logits.shape[-1])
    require_logits(student_logits, teacher_logits)
    trained = TokenReduction(student_logits.shape[:-1], mask, "mean", denominator)
    log_s = F.log_softmax(full_precision(trained.rows(student_logits)), dim=-1)
    log_t = F.log_softmax(full_precision(trained.rows(teacher_logits.detach())), dim=-1)
    sampled = trained.scalars(tokens, "tokens").unsqueeze(-1)
    old = trained.scalars(old_logprobs, "old_logprobs").detach()
    policy = _clipped(
        log_s.gather(-1, sampled).squeeze(-1), log_t.gather(-1, sampled).squeeze(-1), old, epsilon
    )
    gate = teacher_entropy(log_t) >= tau
    divergence = _truncated(log_s[gate], log_t[gate], k)
    loss = trained.reduce(policy.index_add(0, gate.nonzero().squeeze(-1), alpha * divergence))
    return EntropyAware(loss, len(gate), int(gate.sum()), int((divergence.detach() < 0).sum()))


def entropy_gated_mixture(
    student_logits: Tensor,
    teacher_logits: Tensor,
    *,
    mask: Tensor,
    denominator: float | None = None,
) -> Tensor:
    """Mean of ``w KL(T || S) + (1 - w) KL(S || T)`` with ``w = H(T) / log V``; a scalar in nats.

    An algorithm of its own and not ``entropy_aware_opd``: it interpolates instead of adding, over the whole
    vocabulary, and its gate is soft and relative to the largest entropy that ``(..., V)`` logits can have, so a
    larger vocabulary moves it to the reverse direction. A teacher that is sure gives KL(S || T), a uniform one
    KL(T || S). ``mask`` (...) and ``denominator`` are those of ``entropy_aware_opd``.

    Source: none published; it is in use under the other's name. ``ValueError`` for shapes that do not match, a
    mask that is missing or not boolean, and a vocabulary of fewer than 2 entries.
    """
    require_logits(student_logits, teacher_logits)
    vocabulary = student_logits.shape[-1]
    if vocabulary < 2:
        raise ValueError(f"need a vocabulary of at least 2 entries, not {vocabulary}")
    trained = TokenReduction(student_logits.shape[:-1], mask, "mean", denominator)
    student, teacher = trained.rows(student_logits), trained.rows(teacher_logits.detach())
    weight = (teacher_entropy(teacher) / math.log(vocabulary)).clamp(0.0, 1.0)
    forward, reverse = (generalized_jsd(student, teacher, beta=beta) for beta in (0.0, 1.0))
    return trained.reduce(weight * forward + (1.0 - weight) * reverse)


def _clipped(student: Tensor, teacher: Tensor, old: Tensor, epsilon: float) -> Tensor:
    ratio, advantage = (student - old).exp(), teacher - old
    return torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1.0 - epsilon, 1.0 + epsilon))


def _truncated(log_s: Tensor, log_t: Tensor, k: int) -> Tensor:
    """The part of KL(T || S) on the teacher's k likeliest entries; one it gives no mass to adds nothing."""
    top = log_t.topk(k, dim=-1)
    terms = top.values.exp() * (top.values - log_s.gather(-1, top.indices))
    return terms.masked_fill(top.values == -torch.inf, 0.0).sum(-1)


def _require_settings(tau: float, alpha: float, k: int, epsilon: float, vocabulary: int) -> None:
    if not tau >= 0.0:
        raise ValueError(f"tau must not be negative, not {tau}")
    if not 0.0 <= alpha < math.inf:
        raise ValueError(f"alpha must be finite and not negative, not {alpha}")
    if not 1 <= k <= vocabulary:
        raise ValueError(f"k must be in [1, {vocabulary}], the size of the vocabulary, not {k}")
    if not 0.0 < epsilon < math.inf:
        raise ValueError(f"epsilon must be positive and finite, not {epsilon}")
