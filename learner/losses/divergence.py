"""Generalised Jensen-Shannon divergence between a student and a teacher, at gathered positions only.

Both models predict the same token, each in its own sequence. The hidden states of just these positions are
gathered before the vocabulary projection, so B x T x V logits never exist.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor
from trl.kernels.chunked_divergence import ChunkedDivergenceFunction

from hintloop.learner.losses.head import Head

DENSE_ELEMENTS = 1 << 24
"""Positions times vocabulary above which the divergence is computed in tiles (64 MiB of fp32 logits)."""


def generalized_jsd(
    student_logits: Tensor, teacher_logits: Tensor, *, beta: float, temperature: float = 1.0
) -> Tensor:
    """Divergence per position, ``(K,)`` in nats, of two ``(K, V)`` logits; no gradient to the teacher.

    With S, T the tempered distributions and M = (1-beta) S + beta T::

        beta = 0:      KL(T || S)
        beta = 1:      KL(S || T)
        0 < beta < 1:  beta KL(T || M) + (1-beta) KL(S || M)

    The end points are not limits: the middle form goes to 0 as beta goes to 0 or 1. Temperature divides both
    logits and nothing is multiplied by its square. Half-precision logits are raised to fp32.
    Source: Agarwal et al., arXiv:2306.13649, eq. 1. ``ValueError`` for other shapes or a beta outside [0, 1].
    """
    if student_logits.ndim != 2 or student_logits.shape != teacher_logits.shape:
        raise ValueError(f"need two (K, V) matrices, not {student_logits.shape} and {teacher_logits.shape}")
    if not 0.0 <= beta <= 1.0:
        raise ValueError(f"beta must be in [0, 1], not {beta}")
    log_s = F.log_softmax(_full(student_logits) / temperature, dim=-1)
    log_t = F.log_softmax(_full(teacher_logits.detach()) / temperature, dim=-1)
    if beta == 0.0:
        return _kl(log_t, log_s)
    if beta == 1.0:
        return _kl(log_s, log_t)
    log_m = torch.logaddexp(log_s + math.log1p(-beta), log_t + math.log(beta))
    return beta * _kl(log_t, log_m) + (1.0 - beta) * _kl(log_s, log_m)


def hint_divergence(
    student: Tensor,
    teacher: Tensor,
    student_head: Head,
    teacher_head: Head,
    *,
    beta: float,
    temperature: float = 1.0,
) -> Tensor:
    """``generalized_jsd`` from gathered hidden states ``(K, H)`` and ``(K, H')``; gives ``(K,)``.

    Dense while K x V is small, in recomputed tiles beyond that. K = 0 gives an empty tensor whose sum is 0
    and still attached to the student.
    """
    positions, vocabulary = student.shape[0], student_head.weight.shape[0]
    if positions * vocabulary <= DENSE_ELEMENTS:
        return generalized_jsd(
            student_head.logits(student), teacher_head.logits(teacher), beta=beta, temperature=temperature
        )
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


def _kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def _full(logits: Tensor) -> Tensor:
    return logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
