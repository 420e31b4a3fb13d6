"""Sequences that begin alike, side by side in one row, so that their common beginning is computed once.

A row is a tree: a trunk, then branches. A branch continues the first ``fork`` tokens of the trunk; its tokens
see those and each other, and have the positions that they would have in a sequence of their own. The states
are therefore those of the plain sequences, for a model whose tokens meet in masked full attention only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Ints = npt.NDArray[np.int64]

PADDING = -1
"""The branch of padding, which sees itself only: a token that sees nothing has no finite state."""


@dataclass(frozen=True, slots=True)
class Tree:
    """One row; arrays of its length."""

    ids: Ints
    positions: Ints
    branch: Ints
    """0 on the trunk, n on the n-th branch."""
    fork: Ints
    """Number of trunk tokens that a branch continues; 0 on the trunk."""
    columns: tuple[Ints, ...]
    """Where in the row the tokens of each path are: ``ids[columns[n]]`` is the n-th path."""

    def __len__(self) -> int:
        return len(self.ids)


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


def grow(trunk: Ints, paths: Sequence[Ints], *, keep: int = 0) -> Tree:
    """A row from which the states of each path can be read, and those of the trunk's first ``keep`` tokens.

    A path branches off where it first differs from the trunk, and not at all if it never does; the trunk is cut
    behind the last token that something needs.
    """
    forks = [_common(trunk, path) for path in paths]
    size = max([keep, *forks])
    ends = np.cumsum([size, *(len(path) - fork for path, fork in zip(paths, forks, strict=True))])
    ids, positions, branch, fork_of = (np.zeros(ends[-1], dtype=np.int64) for _ in range(4))
    ids[:size], positions[:size] = trunk[:size], np.arange(size)
    columns = []
    for number, (path, fork, start, end) in enumerate(zip(paths, forks, ends, ends[1:], strict=False), 1):
        ids[start:end], positions[start:end] = path[fork:], np.arange(fork, len(path))
        branch[start:end], fork_of[start:end] = number, fork
        columns.append(np.concatenate([np.arange(fork), np.arange(start, end)]))
    return Tree(ids, positions, branch, fork_of, tuple(columns))


def pack(trees: Sequence[Tree]) -> Packed:
    """Rows of any lengths as one batch."""
    return Packed(
        ids=pad([tree.ids for tree in trees]),
        positions=pad([tree.positions for tree in trees]),
        branch=pad([tree.branch for tree in trees], value=PADDING),
        fork=pad([tree.fork for tree in trees]),
    )


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


def _common(one: Ints, two: Ints) -> int:
    """Length of the common beginning."""
    size = min(len(one), len(two))
    differing = np.flatnonzero(one[:size] != two[:size])
    return int(differing[0]) if len(differing) else size
