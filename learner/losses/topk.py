"""Distributions cut down to the k entries that one of two models holds most likely."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

LARGEST_LOG_MASS = -1e-7
"""Log of the mass kept never counts as more than this, so that the log of the rest stays finite."""


@dataclass(frozen=True, slots=True)
class TopK:
    """Which vocabulary entries a divergence looks at."""

    k: int
    """Entries per position, from 1 to the size of the vocabulary."""
    of: Literal["student", "teacher"] = "student"
    """Whose k likeliest entries they are."""
    tail: bool = True
    """All other entries as one more bin, or both distributions renormalised over the k."""

    def __post_init__(self) -> None:
        if self.k < 1:
            raise ValueError(f"k must be at least 1, not {self.k}")
        if self.of not in ("student", "teacher"):
            raise ValueError(f"the k entries are of 'student' or 'teacher', not {self.of!r}")


def on_support(log_student: Tensor, log_teacher: Tensor, top_k: TopK) -> tuple[Tensor, Tensor]:
    """Both distributions on the support that ``top_k`` describes.

    ``(..., V)`` log-probabilities become ``(..., k + 1)`` with a tail and ``(..., k)`` without. With a tail, a
    divergence of the results is a lower bound of the one over the vocabulary and grows with nested supports
    (merging bins cannot increase it), as long as the missing mass is above 1e-7; without, it says nothing about
    the vocabulary. Which entries are chosen carries no gradient. Source: Huebotter et al., arXiv:2601.20802.
    ``ValueError`` for k above V.
    """
    vocabulary = log_student.shape[-1]
    if top_k.k > vocabulary:
        raise ValueError(f"k must be at most the {vocabulary} entries of the vocabulary, not {top_k.k}")
    chosen = log_student if top_k.of == "student" else log_teacher
    support = chosen.detach().topk(top_k.k, dim=-1).indices
    finish = with_tail if top_k.tail else _renormalised
    return finish(log_student.gather(-1, support)), finish(log_teacher.gather(-1, support))


def with_tail(log_probs: Tensor) -> Tensor:
    """``(..., k)`` log-probabilities of total mass at most 1, and the log of the missing mass: ``(..., k + 1)``.

    A mass of 1 (or above, by rounding) leaves a tail of 1e-7 without gradient instead of an infinity.
    """
    log_mass = log_probs.logsumexp(-1, keepdim=True).clamp(max=LARGEST_LOG_MASS)
    return torch.cat([log_probs, torch.log(-torch.expm1(log_mass))], dim=-1)


def _renormalised(log_probs: Tensor) -> Tensor:
    return log_probs - log_probs.logsumexp(-1, keepdim=True)
