"""Which positions of a tensor are trained, and how what was computed for them becomes a loss."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

ReductionName = Literal["none", "mean", "sum"]


@dataclass(frozen=True, slots=True)
class TokenReduction:
    """Picks the trained positions of tensors of a leading ``shape`` and reduces what was computed for them.

    Untrained positions are left out before anything is computed, so their contents (padding, even NaN) cannot
    reach a value or a gradient. ``ValueError`` for a mask that is not boolean or of another shape, a reduction
    over no mask, an unknown reduction, and a denominator that is not positive or has no mean to divide.
    """

    shape: tuple[int, ...]
    mask: Tensor | None = None
    """Of ``shape``; True where a token is trained. None trains all, and is for the reduction "none" only."""
    kind: ReductionName = "none"
    denominator: float | None = None
    """What "mean" divides by: the trained tokens of the whole step, where this is a part of one. By default
    the trained tokens here, and 1 if there are none."""

    def __post_init__(self) -> None:
        if self.kind not in ("none", "mean", "sum"):
            raise ValueError(f"reduction must be 'none', 'mean' or 'sum', not {self.kind!r}")
        if self.mask is None:
            if self.kind != "none":
                raise ValueError(
                    f"reduction {self.kind!r} needs a boolean mask (True = trained), and there is none"
                )
        elif not isinstance(self.mask, Tensor) or self.mask.dtype is not torch.bool:
            given = getattr(self.mask, "dtype", type(self.mask).__name__)
            raise ValueError(f"the mask must be a boolean tensor (True = trained), not {given}")
        elif self.mask.shape != self.shape:
            raise ValueError(f"the mask must be of shape {tuple(self.shape)}, not {tuple(self.mask.shape)}")
        if self.denominator is not None:
            if self.kind != "mean":
                raise ValueError(f"a denominator needs reduction 'mean', not {self.kind!r}")
            if not 0 < self.denominator < math.inf:
                raise ValueError(f"the denominator must be positive, not {self.denominator}")

    def rows(self, vectors: Tensor) -> Tensor:
        """The N trained positions of ``(*shape, D)``, as ``(N, D)``."""
        return vectors.flatten(0, -2) if self.mask is None else vectors[self.mask]

    def scalars(self, values: Tensor, name: str) -> Tensor:
        """The N trained positions of ``shape``, as ``(N,)``. ``ValueError`` with ``name`` for another shape."""
        if values.shape != self.shape:
            raise ValueError(f"{name} must be of shape {tuple(self.shape)}, not {tuple(values.shape)}")
        return values.flatten() if self.mask is None else values[self.mask]

    def reduce(self, values: Tensor) -> Tensor:
        """``(N,)`` values of the trained positions: a scalar, or ``shape`` with 0 elsewhere for "none".

        Without a trained position the sum and the mean are exactly 0 and attached to the graph.
        """
        if self.kind == "sum":
            return values.sum()
        if self.kind == "mean":
            return values.sum() / (self.denominator or max(1, values.numel()))
        if self.mask is None:
            return values.reshape(self.shape)
        return values.new_zeros(self.shape).masked_scatter(self.mask, values)


def require_logits(student: Tensor, teacher: Tensor) -> None:
    """``ValueError`` unless both are ``(..., V)`` of one shape with at least one position axis."""
    if student.ndim < 2 or student.shape != teacher.shape:
        raise ValueError(
            f"need two logits of one shape (..., V), not {tuple(student.shape)} and {tuple(teacher.shape)}"
        )


def full_precision(logits: Tensor) -> Tensor:
    """Half-precision tensors as fp32, others as they are."""
    return logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
