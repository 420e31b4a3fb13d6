"""One optimizer step: which episodes, hint sites and preference pairs enter it, and what they add up to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from hintloop.learner.rows import (
    HintContext,
    PairContext,
    Policy,
    group_advantages,
    hint_context,
    pair_context,
    policy_of,
    row_of,
)
from hintloop.learner.tensors import MicroBatch, Totals, split
from hintloop.replay.episode import Episode

T = TypeVar("T")
C = TypeVar("C", HintContext, PairContext)


@dataclass(frozen=True, slots=True)
class BatchRules:
    """What may enter a step, in how many pieces. ``max_sites`` or ``max_pairs`` of 0 is a channel less."""

    vocabulary: int
    micro_batches: int = 1
    max_staleness: int | None = None
    max_sites: int = 64
    max_pairs: int = 32


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
    found_sites = [
        [hint_context(episode, site, policy.fresh) for site in episode.hint_sites]
        for (episode, _), policy in zip(usable, policies, strict=True)
    ]
    found_pairs = [[pair_context(episode, pair) for pair in episode.pairs] for episode, _ in usable]
    sites = _choose("sites", found_sites, rules.max_sites, rules.vocabulary, random, counts)
    pairs = _choose("pairs", found_pairs, rules.max_pairs, rules.vocabulary, random, counts)
    made = [
        row_of(episode, advantage, policy, hints, preferences)
        for (episode, advantage), policy, hints, preferences in zip(
            usable, policies, sites, pairs, strict=True
        )
    ]
    rows = [row for row in made if row]
    totals = Totals(
        tokens=sum(int(p.scored.sum()) for (_, a), p in zip(usable, policies, strict=True) if a is not None),
        rows=sum(a is not None for _, a in usable),
        hint_tokens=sum(len(site.student_index) for row in rows for site in row.sites),
        pairs=sum(len(row.pairs) for row in rows),
    )
    counts.update(episodes=len(episodes), episodes_unusable=len(episodes) - len(usable), groups=len(groups))
    counts.update(rows=len(rows), sites=sum(len(row.sites) for row in rows), pairs=totals.pairs)
    counts.update(tokens=totals.tokens, hint_tokens=totals.hint_tokens)
    return StepBatch(
        split(rows, totals, rules.micro_batches),
        totals,
        {**counts, **_means([e for e, _ in usable], policies)},
        tuple(e.episode_id for e in episodes),
        tuple(group[0].group_id for group in groups),
    )


def _vote(episode: Episode, rules: BatchRules) -> float | None:
    """The reward; None for what must not be trained on: ungraded, held out, or of another vocabulary."""
    known = all(0 <= token < rules.vocabulary for token in episode.token_ids)
    return episode.reward if known and episode.source != "evaluation" else None


def _choose(
    name: str,
    found: list[list[C | None]],
    limit: int,
    vocabulary: int,
    random: np.random.Generator,
    counts: Counter[str],
) -> list[list[C]]:
    """At most ``limit`` of the contexts found in each episode, without the unusable ones."""
    if not limit:
        return [[] for _ in found]
    every = [(number, context) for number, contexts in enumerate(found) for context in contexts]
    valid = [(n, c) for n, c in every if c and all(ids.max() < vocabulary for ids in c.sequences)]
    taken = _sample(valid, limit, random)
    counts[f"{name}_unusable"], counts[f"{name}_left_out"] = len(every) - len(valid), len(valid) - len(taken)
    return [[context for n, context in taken if n == number] for number in range(len(found))]


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
