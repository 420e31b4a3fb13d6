"""Episodes as verl's ``DataProto``: a row each, with its hint contexts and its pairs beside it.

Beside, and not in a batch of their own, because verl shuffles, splits and sends rows: what belongs to one goes along.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from verl import DataProto

from hintloop.learner.adapters.samples import Sample, samples_of
from hintloop.learner.rows import Bools, Ints
from hintloop.replay.episode import Episode

NAMED = ("prompts", "responses", "input_ids", "attention_mask", "position_ids")
"""What verl needs to know of a sequence."""
EMPTY = np.zeros(0, dtype=np.int32)

Context = tuple[Ints, Ints, Bools, int]
"""Prompt, response, mask of the response, and the column of the row that the response begins at."""


def to_dataproto(
    groups: Sequence[Sequence[Episode]],
    *,
    pad_id: int = 0,
    version: int = 0,
    max_staleness: int | None = None,
) -> Any:
    """Whole groups as one ``DataProto``: a row per episode, with its S hint contexts and its Q pairs beside it.

    Rows are ``prompts`` (B, P), padded on the left, and ``responses`` (B, R), padded on the right: from the first
    trained token on, tool output included, which ``response_mask`` leaves out. ``old_log_probs`` are the recorded
    ones; the reward stands at the last token. Episodes without a vote are alone in their group ``uid``.

    A hint context is ``hint_input_ids`` and ``hint_attention_mask`` (B, S, P + R): the prompt with the hint in it,
    and as response the turn, of which ``hint_response_mask`` (B, S, R) marks the compared tokens. Column j of it is
    column ``hint_start`` (B, S) + j of the row. ``chosen_*`` and ``rejected_*`` (B, Q, ...) are laid out alike.
    What is not there is padding without a mask. ``ValueError`` when nothing can be trained.
    """
    samples = samples_of(groups, version=version, max_staleness=max_staleness)
    if not samples:
        raise ValueError("these groups have nothing to train")
    splits = [_split(sample) for sample in samples]
    kinds = _contexts(samples, splits)
    everything = [
        *((s.ids[:at], s.ids[at:]) for s, at in zip(samples, splits, strict=True)),
        *(context[:2] for rows in kinds.values() for row in rows for context in row),
    ]
    widths = max(len(p) for p, _ in everything), max(len(r) for _, r in everything)
    rows = list(zip(samples, splits, strict=True))
    tensors = _sequences([s.ids[:at] for s, at in rows], [s.ids[at:] for s, at in rows], widths, pad_id)
    tensors["response_mask"] = _right([s.trained[at:] for s, at in rows], widths[1]).long()
    tensors["old_log_probs"] = _right([s.logprobs[at:] for s, at in rows], widths[1])
    tensors["token_level_rewards"] = torch.zeros_like(tensors["old_log_probs"])
    for row, (sample, at) in enumerate(rows):
        tensors["token_level_rewards"][row, len(sample.ids) - at - 1] = sample.reward or 0.0
    for kind, contexts in kinds.items():
        tensors |= _beside(kind, contexts, widths, pad_id)
    uid = [s.group_id if s.advantage is not None else f"{s.group_id}/{s.episode_id}" for s in samples]
    return DataProto.from_dict(tensors, non_tensors={"uid": np.array(uid, dtype=object)})


def hint_contexts(data: Any) -> Any:
    """The H hint contexts of a batch as rows that verl can score; for the reference worker. None without any."""
    return _rows(data, ("hint",))


def pair_responses(data: Any) -> Any:
    """The P chosen, then the P rejected responses, as rows that verl can score. None without any."""
    return _rows(data, ("chosen", "rejected"))


def _rows(data: Any, kinds: tuple[str, ...]) -> Any:
    """The contexts of these kinds, one after the other, as a batch of sequences."""
    picked: dict[str, list[Tensor]] = {name: [] for name in ("input_ids", "attention_mask", "response_mask")}
    for kind in kinds:
        there = data.batch[f"{kind}_response_mask"].bool().any(-1)
        for name, parts in picked.items():
            parts.append(data.batch[f"{kind}_{name}"][there])
    tensors = {name: torch.cat(parts) for name, parts in picked.items()}
    if not len(tensors["input_ids"]):
        return None
    start = data.batch["prompts"].shape[1]
    tensors["position_ids"] = _positions(tensors["attention_mask"])
    tensors["prompts"], tensors["responses"] = (
        tensors["input_ids"][:, :start],
        tensors["input_ids"][:, start:],
    )
    return DataProto.from_dict(tensors)


def _split(sample: Sample) -> int:
    """Where the response of an episode begins: at its first trained token, or at its last one without any."""
    return max(1, int(np.argmax(sample.trained)) if sample.trained.any() else len(sample.ids) - 1)


def _contexts(samples: list[Sample], splits: list[int]) -> dict[str, list[list[Context]]]:
    """For each kind and sample its contexts: prompt, response, mask of the response, start in the sample's own."""
    found: dict[str, list[list[Context]]] = {"hint": [], "chosen": [], "rejected": []}
    for sample, split in zip(samples, splits, strict=True):
        hints = []
        for site in sample.sites:
            at = site.student_index + 1
            first, mask = int(at[0]), np.zeros(int(at[-1] - at[0]) + 1, dtype=np.bool_)
            mask[at - first] = True
            prompt = np.concatenate([site.prompt, site.hint, site.turn[: first - len(site.prompt)]])
            hints.append((prompt, sample.ids[first : first + len(mask)], mask, first - split))
        found["hint"].append(hints)
        for side, kind in enumerate(("chosen", "rejected")):
            sides = [(pair.prompt, pair.responses[side]) for pair in sample.pairs]
            found[kind].append([(p, r, np.ones(len(r), dtype=np.bool_), 0) for p, r in sides])
    return found


def _beside(
    kind: str, contexts: list[list[Context]], widths: tuple[int, int], pad_id: int
) -> dict[str, Tensor]:
    """(B, N, ...) tensors of the contexts of one kind, N as many as the row with most of them has."""
    most = max(map(len, contexts))
    padded = [
        context for row in contexts for context in [*row, *[(EMPTY, EMPTY, EMPTY, 0)] * (most - len(row))]
    ]
    tensors = _sequences([c[0] for c in padded], [c[1] for c in padded], widths, pad_id)
    named = {
        "input_ids": tensors["input_ids"],
        "attention_mask": tensors["attention_mask"],
        "response_mask": _right([c[2] for c in padded], widths[1]).long(),
        **({"start": torch.tensor([c[3] for c in padded], dtype=torch.int64)} if kind == "hint" else {}),
    }
    return {f"{kind}_{name}": t.reshape(len(contexts), most, *t.shape[1:]) for name, t in named.items()}


def _sequences(
    prompts: list[Ints], responses: list[Ints], widths: tuple[int, int], pad_id: int
) -> dict[str, Tensor]:
    """``NAMED`` tensors of N sequences of P + R columns."""
    ids = np.full((len(prompts), sum(widths)), pad_id, dtype=np.int64)
    attended = np.zeros_like(ids)
    for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        own = slice(widths[0] - len(prompt), widths[0] + len(response))
        ids[row, own], attended[row, own] = np.concatenate([prompt, response]), 1
    tokens, attention = torch.from_numpy(ids), torch.from_numpy(attended)
    parts = tokens[:, : widths[0]], tokens[:, widths[0] :]
    return dict(zip(NAMED, (*parts, tokens, attention, _positions(attention)), strict=True))


def _positions(attention: Tensor) -> Tensor:
    return (attention.cumsum(-1) - 1).clamp(min=0)


def _right(arrays: list[Any], width: int) -> Tensor:
    """(N, width) fp32, padded with 0 on the right."""
    padded = np.zeros((len(arrays), width), dtype=np.float32)
    for row, array in zip(padded, arrays, strict=True):
        row[: len(array)] = array
    return torch.from_numpy(padded)
