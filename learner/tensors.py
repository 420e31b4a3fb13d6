"""Rows as tensors, in micro-batches; each has up to three passes over packed rows, and what to read from them.

The denominators span the whole step, so how it is split into micro-batches changes no gradient.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hintloop.learner.packing import Ints, Packed, Path, Tree, grow, pack, pad
from hintloop.learner.rows import Row


@dataclass(frozen=True, slots=True)
class Totals:
    """Denominators of the step."""

    tokens: int = 0
    """Trainable tokens of all episodes that vote, those with advantage 0 included."""
    rows: int = 0
    """Episodes that vote."""
    hint_tokens: int = 0
    pairs: int = 0


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """B episodes with their K compared tokens and their P pairs; any of these may be none.

    An index is ``(N, 2)``: row and column, in a pass, of the states that predict N tokens.
    """

    student: Packed
    """(B, W): the episodes, and the responses that differ from them"""
    trained: Tensor
    """(B, W) bool: tokens of the policy loss"""
    logprobs: Tensor
    """(B, W) of the policy that sampled"""
    advantages: Tensor
    """(B,)"""
    teacher: Packed
    """Hinted contexts"""
    student_index: Tensor
    """(K, 2) in ``student``"""
    teacher_index: Tensor
    """(K, 2) in ``teacher``: the same tokens"""
    site_targets: Tensor
    """(K,): these tokens"""
    site_logprobs: Tensor
    """(K,) of the policy that sampled; NaN where it is unknown"""
    site_lengths: tuple[int, ...]
    """Compared tokens of each site; K in all"""
    reference: Packed
    """Responses, for the reference model"""
    pair_student_index: Tensor
    """(N, 2) in ``student``: tokens of all responses"""
    pair_reference_index: Tensor
    """(N, 2) in ``reference``: the same tokens"""
    pair_targets: Tensor
    """(N,): these tokens"""
    pair_response: Tensor
    """(N,): number of the response, below P for the chosen ones, from P on for the rejected in the same order"""
    pairs: int
    """P"""
    totals: Totals

    def to(self, device: torch.device) -> MicroBatch:
        """The same on another device."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        moved: dict[str, Any] = {n: v.to(device) for n, v in values.items() if isinstance(v, Tensor | Packed)}
        return replace(self, **moved)


def states_at(hidden: Tensor, index: Tensor) -> Tensor:
    """``(N, H)`` of ``(B, W, H)`` at the rows and columns of an index."""
    return hidden[index[:, 0], index[:, 1]]


def split(rows: Sequence[Row], totals: Totals, micro_batches: int) -> tuple[MicroBatch, ...]:
    """Neighbours in length share a micro-batch; some are empty when there are fewer rows."""
    trees = [_student_tree(row) for row in rows]
    order = np.argsort([len(tree) for tree in trees], kind="stable")
    return tuple(
        _micro_batch([rows[i] for i in part], [trees[i] for i in part], totals)
        for part in np.array_split(order, micro_batches)
    )


def _student_tree(row: Row) -> Tree:
    return grow(row.ids, _pair_paths(row), keep=row.keep)


def _pair_paths(row: Row) -> list[Path]:
    """Two per pair. The last token of a response predicts nothing, so its state is not needed."""
    return [Path(len(pair.prompt), ids[:-1]) for pair in row.pairs for ids in pair.responses]


def _micro_batch(rows: list[Row], students: list[Tree], totals: Totals) -> MicroBatch:
    hinted, paired = [row for row in rows if row.sites], [row for row in rows if row.pairs]
    teachers = [grow(row.ids, [Path(len(s.prompt), s.hinted[:-1]) for s in row.sites]) for row in hinted]
    references = [grow(row.ids, _pair_paths(row)) for row in paired]
    targets = _flat(site.targets for row in rows for site in row.sites)
    same = _flat(row.ids[site.student_index + 1] for row in rows for site in row.sites)
    assert torch.equal(targets, same), "student and teacher must predict the same tokens"
    packed = pack(students)
    width = packed.ids.shape[1]
    pairs = [pair for row in paired for pair in row.pairs]
    return MicroBatch(
        student=packed,
        trained=pad([row.trained for row in rows], np.bool_, width=width),
        logprobs=pad([row.logprobs for row in rows], np.float32, width=width),
        advantages=torch.tensor([row.advantage for row in rows], dtype=torch.float32),
        teacher=pack(teachers),
        student_index=_index((n, site.student_index) for n, row in enumerate(rows) for site in row.sites),
        teacher_index=_index(
            (n, tree.columns(number, site.teacher_index))
            for n, (tree, row) in enumerate(zip(teachers, hinted, strict=True))
            for number, site in enumerate(row.sites)
        ),
        site_targets=targets,
        site_logprobs=torch.from_numpy(
            np.concatenate([np.zeros(0, np.float32), *(s.logprobs for row in rows for s in row.sites)])
        ),
        site_lengths=tuple(len(site.student_index) for row in rows for site in row.sites),
        reference=pack(references),
        pair_student_index=_response_index(students, rows),
        pair_reference_index=_response_index(references, paired),
        pair_targets=_flat(ids for pair in pairs for ids in pair.responses),
        pair_response=_flat(
            np.full(len(ids), number + side * len(pairs))
            for number, pair in enumerate(pairs)
            for side, ids in enumerate(pair.responses)
        ),
        pairs=len(pairs),
        totals=totals,
    )


def _response_index(trees: list[Tree], rows: list[Row]) -> Tensor:
    """The states of both responses of each pair, pair by pair."""
    return _index(
        (number, tree.columns(path, np.arange(start, start + len(ids))))
        for number, (tree, row) in enumerate(zip(trees, rows, strict=True))
        for path, (start, ids) in enumerate(
            (len(pair.prompt) - 1, ids) for pair in row.pairs for ids in pair.responses
        )
    )


def _index(entries: Iterable[tuple[int, Ints]]) -> Tensor:
    """``(N, 2)`` of row and column."""
    rows: list[int] = []
    columns: list[Ints] = [np.zeros(0, dtype=np.int64)]
    for row, found in entries:
        rows.append(row)
        columns.append(found)
    lengths = [len(found) for found in columns[1:]]
    return torch.from_numpy(
        np.stack([np.repeat(np.array(rows, dtype=np.int64), lengths), np.concatenate(columns)], axis=1)
    )


def _flat(arrays: Iterable[Ints]) -> Tensor:
    return torch.from_numpy(np.concatenate([np.zeros(0, dtype=np.int64), *arrays]))
