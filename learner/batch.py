"""One optimizer step as tensors: rows of all three channels in micro-batches, with the step's denominators.

Padding is on the right and attention masks come from lengths, never from token values. The denominators span
the whole step, so how it is split into micro-batches changes no gradient.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from hintloop.learner.rows import (
    PairRow,
    Policy,
    Row,
    TeacherRow,
    group_advantages,
    pair_row,
    policy_of,
    student_row,
    teacher_row,
)
from hintloop.replay.episode import Episode

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class BatchRules:
    """What may enter a step, in how many pieces. ``max_sites`` or ``max_pairs`` of 0 is a channel less."""

    vocabulary: int
    micro_batches: int = 1
    max_staleness: int | None = None
    max_sites: int = 64
    max_pairs: int = 32


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
    """B student rows, their R teacher rows, and P pairs; any of them may be none."""

    ids: Tensor
    """(B, T)"""
    attention: Tensor
    """(B, T), 1 on tokens"""
    trained: Tensor
    """(B, T) bool: tokens of the policy loss"""
    logprobs: Tensor
    """(B, T) of the policy that sampled"""
    advantages: Tensor
    """(B,)"""
    teacher_ids: Tensor
    """(R, U)"""
    teacher_attention: Tensor
    """(R, U)"""
    student_index: Tensor
    """(K, 2): row and position in ``ids`` of the states that predict the compared tokens"""
    teacher_index: Tensor
    """(K, 2): the same in ``teacher_ids``"""
    pair_ids: Tensor
    """(2P, W): P chosen rows, then P rejected rows in the same order"""
    pair_attention: Tensor
    """(2P, W)"""
    pair_response: Tensor
    """(2P, W) bool: tokens of the response"""
    totals: Totals

    def to(self, device: torch.device) -> MicroBatch:
        """The same on another device."""
        tensors = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "totals"}
        return replace(self, **{name: tensor.to(device) for name, tensor in tensors.items()})


@dataclass(frozen=True, slots=True)
class StepBatch:
    """Everything that one optimizer step needs."""

    micro_batches: tuple[MicroBatch, ...]
    totals: Totals
    counts: dict[str, float]
    """What went in and what was left out; a mean that has nothing to average over is absent."""
    episode_ids: tuple[str, ...]
    group_ids: tuple[str, ...]


def build_step(
    groups: Sequence[Sequence[Episode]], rules: BatchRules, *, version: int, seed: Sequence[int]
) -> StepBatch:
    """Turn whole groups of episodes into a step for weights of ``version``.

    ``seed`` decides which sites and pairs are taken when there are more than the rules allow.
    """
    random = np.random.default_rng(list(seed))
    counts: Counter[str] = Counter()
    episodes = [e for group in groups for e in group]
    advantages = [a for group in groups for a in group_advantages([_vote(e, rules) for e in group])]
    usable = [(e, a) for e, a in zip(episodes, advantages, strict=True) if _vote(e, rules) is not None]
    policies = [policy_of(e, version=version, max_staleness=rules.max_staleness) for e, _ in usable]
    sites = _sites([e for e, _ in usable], policies, rules, random, counts)
    pairs = _pairs([e for e, _ in usable], rules, random, counts)
    rows = [
        row
        for (episode, advantage), policy, chosen in zip(usable, policies, sites, strict=True)
        if (row := student_row(episode, policy, advantage, chosen))
    ]
    totals = Totals(
        tokens=sum(int(p.scored.sum()) for (_, a), p in zip(usable, policies, strict=True) if a is not None),
        rows=sum(a is not None for _, a in usable),
        hint_tokens=sum(len(site.student_index) for row in rows for site in row.sites),
        pairs=len(pairs),
    )
    counts.update(episodes=len(episodes), episodes_unusable=len(episodes) - len(usable), groups=len(groups))
    counts.update(rows=len(rows), sites=sum(len(row.sites) for row in rows), pairs=len(pairs))
    counts.update(tokens=totals.tokens, hint_tokens=totals.hint_tokens)
    return StepBatch(
        _split(rows, pairs, totals, rules.micro_batches),
        totals,
        {**counts, **_means([e for e, _ in usable], policies)},
        tuple(e.episode_id for e in episodes),
        tuple(group[0].group_id for group in groups),
    )


def _vote(episode: Episode, rules: BatchRules) -> float | None:
    """The reward; None for what must not be trained on: ungraded, held out, or of another vocabulary."""
    known = all(0 <= token < rules.vocabulary for token in episode.token_ids)
    return episode.reward if known and episode.source != "evaluation" else None


def _sites(
    episodes: list[Episode],
    policies: list[Policy],
    rules: BatchRules,
    random: np.random.Generator,
    counts: Counter[str],
) -> list[list[TeacherRow]]:
    """The teacher rows of each episode."""
    chosen: list[list[TeacherRow]] = [[] for _ in episodes]
    if not rules.max_sites:
        return chosen
    found = [
        (index, teacher_row(episode, site, policies[index].fresh))
        for index, episode in enumerate(episodes)
        for site in episode.hint_sites
    ]
    valid = [(i, row) for i, row in found if row is not None and row.ids.max() < rules.vocabulary]
    taken = _sample(valid, rules.max_sites, random)
    counts.update(sites_unusable=len(found) - len(valid), sites_left_out=len(valid) - len(taken))
    for index, row in taken:
        chosen[index].append(row)
    return [sorted(rows, key=lambda row: int(row.student_index[-1])) for rows in chosen]


def _pairs(
    episodes: list[Episode], rules: BatchRules, random: np.random.Generator, counts: Counter[str]
) -> list[PairRow]:
    if not rules.max_pairs:
        return []
    found = [pair_row(episode, pair) for episode in episodes for pair in episode.pairs]
    valid = [p for p in found if p and max(p.chosen.max(), p.rejected.max()) < rules.vocabulary]
    taken = _sample(valid, rules.max_pairs, random)
    counts.update(pairs_unusable=len(found) - len(valid), pairs_left_out=len(valid) - len(taken))
    return taken


def _sample(items: list[T], limit: int, random: np.random.Generator) -> list[T]:
    if len(items) <= limit:
        return items
    return [items[i] for i in sorted(random.choice(len(items), limit, replace=False))]


def _means(episodes: list[Episode], policies: list[Policy]) -> dict[str, float]:
    """Reward, staleness and how many sampled tokens cannot be trained."""
    means: dict[str, float] = {
        "tokens_stale": float(sum(int((p.sampled & ~p.fresh).sum()) for p in policies)),
        "tokens_unscored": float(sum(int((p.fresh & ~p.scored).sum()) for p in policies)),
    }
    if episodes:
        means["reward_mean"] = float(np.mean([e.reward for e in episodes]))
        means["solved"] = float(np.mean([e.outcome == "solved" for e in episodes]))
    lags = np.concatenate([p.lags for p in policies]) if policies else np.zeros(0)
    if len(lags):
        means["staleness_mean"], means["staleness_max"] = float(lags.mean()), float(lags.max())
    return means


def _split(
    rows: list[Row], pairs: list[PairRow], totals: Totals, micro_batches: int
) -> tuple[MicroBatch, ...]:
    """Neighbours in length share a micro-batch; long pairs go with short rows, to even out the memory."""
    by_length = np.array_split(np.argsort([len(row) for row in rows], kind="stable"), micro_batches)
    pair_order = np.argsort([-len(pair) for pair in pairs], kind="stable")
    by_pair_length = np.array_split(pair_order, micro_batches)
    return tuple(
        _micro_batch([rows[i] for i in row_part], [pairs[i] for i in pair_part], totals)
        for row_part, pair_part in zip(by_length, by_pair_length, strict=True)
    )


def _micro_batch(rows: list[Row], pairs: list[PairRow], totals: Totals) -> MicroBatch:
    sites = [(index, site) for index, row in enumerate(rows) for site in row.sites]
    both = [pair.chosen for pair in pairs] + [pair.rejected for pair in pairs]
    starts = torch.tensor([pair.prompt_end for pair in pairs] * 2, dtype=torch.long)
    pair_attention = _lengths_mask(both)
    positions = torch.arange(pair_attention.shape[1])
    return MicroBatch(
        ids=_pad([row.ids for row in rows]),
        attention=_lengths_mask([row.ids for row in rows]),
        trained=_pad([row.trained for row in rows], torch.bool),
        logprobs=_pad([row.logprobs for row in rows], torch.float32),
        advantages=torch.tensor([row.advantage for row in rows], dtype=torch.float32),
        teacher_ids=_pad([site.ids for _, site in sites]),
        teacher_attention=_lengths_mask([site.ids for _, site in sites]),
        student_index=_index([(row, site.student_index) for row, site in sites]),
        teacher_index=_index([(number, site.teacher_index) for number, (_, site) in enumerate(sites)]),
        pair_ids=_pad(both),
        pair_attention=pair_attention,
        pair_response=(positions[None] >= starts[:, None]) & pair_attention.bool(),
        totals=totals,
    )


def _pad(arrays: Sequence[np.ndarray], dtype: torch.dtype = torch.long) -> Tensor:
    padded = torch.zeros(len(arrays), max(map(len, arrays), default=0), dtype=dtype)
    for row, array in enumerate(arrays):
        padded[row, : len(array)] = torch.from_numpy(array)
    return padded


def _lengths_mask(arrays: Sequence[np.ndarray]) -> Tensor:
    return _pad([np.ones(len(array), dtype=np.int64) for array in arrays])


def _index(entries: Sequence[tuple[int, np.ndarray]]) -> Tensor:
    """``(K, 2)`` of row and position."""
    pairs = [torch.stack([torch.full((len(a),), row), torch.from_numpy(a)], dim=1) for row, a in entries]
    return torch.cat(pairs) if pairs else torch.zeros(0, 2, dtype=torch.long)
