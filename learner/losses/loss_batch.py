"""What ``compose_loss`` looks at: token sequences, pairs of indices into them, and pairs of responses."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Token sequences of one length, padded on the right. ``ValueError`` for other types or shapes."""

    ids: Tensor
    """(B, T), int64."""
    attended: Tensor
    """(B, T), boolean: False where padded."""
    trained: Tensor
    """(B, T), boolean: True at the tokens (not: predictions) that a loss is computed for."""

    def __post_init__(self) -> None:
        _require("ids", self.ids, torch.int64, (-1, -1))
        for name in ("attended", "trained"):
            _require(name, getattr(self, name), torch.bool, tuple(self.ids.shape))
        if bool((self.trained & ~self.attended).any()) or bool(self.trained[:, :1].any()):
            raise ValueError(
                "trained tokens must be attended and not the first of a row, which nothing predicts"
            )

    def to(self, device: torch.device | str) -> Rows:
        """The same on ``device``."""
        return Rows(*(getattr(self, field.name).to(device) for field in fields(self)))


@dataclass(frozen=True, slots=True, eq=False)
class Hinted:
    """The teacher's view of K tokens of the rollout.

    The rollout's trained tokens are no concern of it: ``student_at`` and ``teacher_at`` alone say which tokens are
    distilled. ``trained`` of ``teacher`` marks the same tokens there.
    """

    teacher: Rows
    """(B', T'): the rollout rows with hints in them, each up to the end of its last target at least."""
    student_at: Tensor
    """(K, 2), int64: row and position of each token in the rollout."""
    teacher_at: Tensor
    """(K, 2), int64: row and position of the same token in ``teacher``."""
    old_logprobs: Tensor | None = None
    """(K,): log-probabilities in nats under the policy that sampled, at the temperature of the loss; for the
    wrapper "entropy_opd" only. None stands for those of the student itself, as if it had sampled just now."""

    def __post_init__(self) -> None:
        _require("student_at", self.student_at, torch.int64, (-1, 2))
        _require("teacher_at", self.teacher_at, torch.int64, tuple(self.student_at.shape))
        if not len(self.student_at):
            raise ValueError("the hint channel has no token; leave the channel out instead")

    def to(self, device: torch.device | str) -> Hinted:
        """The same on ``device``."""
        old = None if self.old_logprobs is None else self.old_logprobs.to(device)
        return Hinted(self.teacher.to(device), self.student_at.to(device), self.teacher_at.to(device), old)


@dataclass(frozen=True, slots=True, eq=False)
class Pairs:
    """P chosen and P rejected responses. ``ValueError`` where the rows do not make pairs."""

    rows: Rows
    """(2 P, T): the chosen ones, then the rejected ones in the same order; ``trained`` marks the responses, their
    end-of-turn tokens included."""
    reference: Tensor | None = None
    """(2 P,): the rows' summed log-probabilities in nats under the reference model; see ``with_reference``."""

    def __post_init__(self) -> None:
        count = len(self.rows.ids)
        if not count or count % 2:
            raise ValueError(
                f"need as many chosen as rejected rows, at least one of each, not {count} rows in all"
            )
        if not bool(self.rows.trained.any(-1).all()):
            raise ValueError("a response of a pair has no tokens")
        if self.reference is not None and self.reference.shape != (count,):
            raise ValueError(f"the reference must be of shape {(count,)}, not {tuple(self.reference.shape)}")

    def to(self, device: torch.device | str) -> Pairs:
        """The same on ``device``."""
        return Pairs(self.rows.to(device), None if self.reference is None else self.reference.to(device))


@dataclass(frozen=True, slots=True, eq=False)
class LossBatch:
    """What one step looks at; a channel that is None is absent. ``ValueError`` for hints without a rollout."""

    rollout: Rows | None = None
    """The student's context, and the tokens that it imitates."""
    hinted: Hinted | None = None
    pairs: Pairs | None = None

    def __post_init__(self) -> None:
        if self.hinted is not None and self.rollout is None:
            raise ValueError("the hint channel needs the rollout, whose tokens it distils; it is None")

    def to(self, device: torch.device | str) -> LossBatch:
        """The same on ``device``."""
        channels = (self.rollout, self.hinted, self.pairs)
        return LossBatch(*(None if c is None else c.to(device) for c in channels))  # type: ignore[arg-type]


def _require(name: str, tensor: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """``ValueError`` unless it is such a tensor; -1 stands for any size."""
    if not isinstance(tensor, Tensor) or tensor.dtype is not dtype:
        given = getattr(tensor, "dtype", type(tensor).__name__)
        raise ValueError(f"{name} must be a tensor of {dtype}, not {given}")
    if tensor.ndim != len(shape) or any(w not in (-1, g) for w, g in zip(shape, tensor.shape, strict=True)):
        raise ValueError(f"{name} must be of shape {shape} (-1: any), not {tuple(tensor.shape)}")
