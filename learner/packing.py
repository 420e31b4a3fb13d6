"""Sequences that begin alike, side by side in one row, so that their common beginning is computed once.

A row is a tree: a trunk, then branches. A branch continues the first ``fork`` tokens of the trunk; its tokens
see those and each other, and have the positions that they would have in a sequence of their own. The states
are therefore those of the plain sequences, for a model whose tokens meet in masked full attention only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Ints = npt.NDArray[np.integer[Any]]

PADDING = -1
"""The branch of padding, which sees itself only: a token that sees nothing has no finite state."""


@dataclass(frozen=True, slots=True)
class Path:
    """A sequence that begins like a trunk: its first ``shared`` tokens, then ``ids``."""

    shared: int
    ids: Ints

    def __len__(self) -> int:
        return self.shared + len(self.ids)


@dataclass(frozen=True, slots=True)
class Tree:
    """One row: the trunk, then the branches one after the other."""

    trunk: Ints
    """As much of it as something needs."""
    branches: tuple[Path, ...]
    """The paths, each from where it leaves the trunk; without tokens of its own where it never does."""
    starts: tuple[int, ...]
    """Where in the row each branch begins."""

    def __len__(self) -> int:
        return self.starts[-1] + len(self.branches[-1].ids) if self.branches else len(self.trunk)

    def columns(self, path: int, index: Ints) -> Ints:
        """Where in the row the tokens of these ascending indices in a path are."""
        fork = self.branches[path].shared
        moved = index + (self.starts[path] - fork)
        return moved if index[0] >= fork else np.where(index < fork, index, moved)


@dataclass(frozen=True, slots=True)
class Packed:
    """B rows, padded on the right to W columns."""

    ids: Tensor
    """(B, W)"""
    positions: Tensor
    """(B, W)"""
    branch: Tensor
    """(B, W), ``PADDING`` behind the end of a row"""
    fork: Tensor
    """(B, W)"""

    def __len__(self) -> int:
        return len(self.ids)

    def to(self, device: torch.device) -> Packed:
        """The same on another device."""
        return Packed(*(t.to(device) for t in (self.ids, self.positions, self.branch, self.fork)))

    def mask(self) -> Tensor:
        """(B, 1, W, W) fp32 to add to attention scores: 0 where a token (third axis) sees another, else -inf."""
        columns = torch.arange(self.ids.shape[1], device=self.ids.device)
        seen = (self.branch[:, :, None] == self.branch[:, None]) | (columns < self.fork[:, :, None])
        seen &= columns <= columns[:, None]
        return torch.zeros(seen.shape, device=seen.device).masked_fill_(~seen, -torch.inf)[:, None]


def grow(trunk: Ints, paths: Sequence[Path], *, keep: int = 0) -> Tree:
    """A row from which the states of each path can be read, and those of the trunk's first ``keep`` tokens.

    A path branches off where it first differs from the trunk, and not at all if it never does; the trunk is cut
    behind the last token that something needs.
    """
    branches = tuple(_branch(trunk, path) for path in paths)
    size = max([keep, *(branch.shared for branch in branches)])
    starts = (
        tuple(accumulate((len(branch.ids) for branch in branches[:-1]), initial=size)) if branches else ()
    )
    return Tree(trunk[:size], branches, starts)


def pack(trees: Sequence[Tree]) -> Packed:
    """Rows of any lengths as one batch."""
    shape = len(trees), max(map(len, trees), default=0)
    count = np.arange(shape[1])
    ids, positions = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
    branch, fork = np.full(shape, PADDING, dtype=np.int32), np.zeros(shape, dtype=np.int32)
    for row, tree in enumerate(trees):
        size = len(tree.trunk)
        ids[row, :size], positions[row, :size], branch[row, :size] = tree.trunk, count[:size], 0
        for number, (path, start) in enumerate(zip(tree.branches, tree.starts, strict=True), 1):
            own = slice(start, start + len(path.ids))
            ids[row, own], positions[row, own] = path.ids, count[path.shared : len(path)]
            branch[row, own], fork[row, own] = number, path.shared
    return Packed(*map(torch.from_numpy, (ids, positions, branch, fork)))


def pad(
    arrays: Sequence[npt.NDArray[Any]],
    dtype: npt.DTypeLike = np.int64,
    *,
    value: int = 0,
    width: int | None = None,
) -> Tensor:
    """``(B, width)`` of B arrays, padded on the right; without a width, as wide as the longest."""
    longest = max(map(len, arrays), default=0) if width is None else width
    padded = np.full((len(arrays), longest), value, dtype=dtype)
    for row, array in zip(padded, arrays, strict=True):
        row[: len(array)] = array
    return torch.from_numpy(padded)


def require_masks(model: Any) -> None:
    """``ValueError`` unless every layer of the model is full attention that takes a mask of its own."""
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if getattr(config, "sliding_window", None):
        kinds.add("sliding_attention")
    attention = config._attn_implementation
    if attention not in ("sdpa", "eager") or kinds != {"full_attention"}:
        raise ValueError(
            "the learner puts several contexts in one row, which needs full attention in every layer and the "
            f"'sdpa' or 'eager' implementation; {config.model_type} has {sorted(kinds)} with {attention!r}"
        )


def _branch(trunk: Ints, path: Path) -> Path:
    """The path, with as much of it shared as there is in common."""
    beside = trunk[path.shared : len(path)]
    if not len(beside) or beside[0] != path.ids[0]:  # as nearly always
        return path
    differing = np.flatnonzero(beside != path.ids[: len(beside)])
    same = int(differing[0]) if len(differing) else len(beside)
    return Path(path.shared + same, path.ids[same:])
