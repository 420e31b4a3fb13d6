"""One optimizer step: which episodes, hint sites and preference pairs enter it, and what they add up to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import numpy as np

from hintloop.learner.config import LearnerConfig
from hintloop.learner.rows import (
    Bools,
    HintContext,
    Ints,
    PairContext,
    Policy,
    cut_pair,
    cut_site,
    group_advantages,
    hint_context,
    integers,
    pair_context,
    policy_of,
    recovery_of,
    rows_of,
)
from hintloop.learner.tensors import MicroBatch, Totals, split
from hintloop.replay.episode import Episode, HintSite, Outcome

COUNTED = (
    *("episodes", "episodes_unusable"),
    *("tokens", "tokens_stale", "tokens_unscored", "tokens_too_long"),
    *("sites", "sites_unusable", "sites_too_long", "sites_left_out"),
    *("pairs", "pairs_unusable", "pairs_too_long", "pairs_left_out"),
)
"""The counts of a step that add up over steps: what was used, and under longer names what was not and why."""

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
    max_tokens: int | None = None
    """Longest context, its target turn included: an episode's part that is computed, a hinted context, a side of
    a pair. Later tokens of an episode leave the policy loss; the other two lose the beginning of their prompt."""
    site: Literal["failing", "recovery"] = "failing"
    """The turn that a hint is compared at: the one whose call failed, or the assistant's next."""

    @classmethod
    def of(cls, config: LearnerConfig, vocabulary: int, *, live: bool) -> BatchRules:
        """As configured; on a journal that is not ``live`` nothing is too old."""
        return cls(
            vocabulary=vocabulary,
            micro_batches=config.micro_batches,
            max_staleness=config.max_staleness if live else None,
            max_sites=config.max_sites_per_step if config.alpha_sdpo else 0,
            max_pairs=config.max_pairs_per_step if config.beta_replay else 0,
            max_tokens=config.max_row_tokens,
            site=config.site,
        )


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
    tokens = [_usable(e, rules) for e in episodes]
    votes = iter([None if ids is None else e.reward for e, ids in zip(episodes, tokens, strict=True)])
    advantages = [a for group in groups for a in group_advantages([next(votes) for _ in group])]
    usable = [(e, a) for e, a, ids in zip(episodes, advantages, tokens, strict=True) if ids is not None]
    stale, cap = rules.max_staleness, rules.max_tokens
    policies = [
        policy_of(e, version=version, max_staleness=stale, max_tokens=cap, ids=ids)
        for e, ids in zip(episodes, tokens, strict=True)
        if ids is not None
    ]
    known = [(episode, policy) for (episode, _), policy in zip(usable, policies, strict=True)]
    found_sites = [[_site(e, site, policy, rules) for site in e.hint_sites] for e, policy in known]
    found_pairs = [[pair_context(e, pair, policy.ids) for pair in e.pairs] for e, policy in known]
    counts["sites_unusable"] += sum(len(e.hint_sites) for e in episodes) - sum(map(len, found_sites))
    counts["pairs_unusable"] += sum(len(e.pairs) for e in episodes) - sum(map(len, found_pairs))
    sites = _choose("sites", found_sites, cut_site, rules.max_sites, rules, random, counts)
    pairs = _choose("pairs", found_pairs, cut_pair, rules.max_pairs, rules, random, counts)
    rows = [
        row
        for (episode, advantage), policy, hints, preferences in zip(
            usable, policies, sites, pairs, strict=True
        )
        for row in rows_of(episode, advantage, policy, hints, preferences)
    ]
    totals = Totals(
        tokens=sum(
            int(np.count_nonzero(p.scored))
            for (_, a), p in zip(usable, policies, strict=True)
            if a is not None
        ),
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


def _usable(episode: Episode, rules: BatchRules) -> Ints | None:
    """The tokens; None for what must not be trained on: broken, held out, empty, or of another vocabulary."""
    if episode.outcome is Outcome.INFRA_ERROR or episode.source == "evaluation" or not episode.token_ids:
        return None
    ids = integers(episode.token_ids)
    return ids if ids.min() >= 0 and ids.max() < rules.vocabulary else None


def _site(episode: Episode, site: HintSite, policy: Policy, rules: BatchRules) -> HintContext | None:
    compared = site if rules.site == "failing" else recovery_of(episode, site)
    return None if compared is None else hint_context(episode, compared, policy.fresh, policy.ids)


def _choose(
    name: str,
    found: list[list[C | None]],
    cut: Callable[[C, int], C | None],
    limit: int,
    rules: BatchRules,
    random: np.random.Generator,
    counts: Counter[str],
) -> list[list[C]]:
    """At most ``limit`` of the contexts found in each episode, without the unusable and the too long ones."""
    if not limit:
        return [[] for _ in found]
    every = [(number, context) for number, contexts in enumerate(found) for context in contexts]
    valid = [
        (n, c) for n, c in every if c and all(ids.max(initial=0) < rules.vocabulary for ids in c.foreign)
    ]
    short = [(n, c if rules.max_tokens is None else cut(c, rules.max_tokens)) for n, c in valid]
    fitting = [(n, c) for n, c in short if c]
    taken = _sample(fitting, limit, random)
    counts[f"{name}_unusable"] += len(every) - len(valid)
    counts[f"{name}_too_long"] = len(valid) - len(fitting)
    counts[f"{name}_left_out"] = len(fitting) - len(taken)
    chosen: list[list[C]] = [[] for _ in found]
    for number, context in taken:
        chosen[number].append(context)
    return chosen


def _sample(items: list[T], limit: int, random: np.random.Generator) -> list[T]:
    if len(items) <= limit:
        return items
    return [items[i] for i in sorted(random.choice(len(items), limit, replace=False))]


def _means(episodes: list[Episode], policies: list[Policy]) -> dict[str, float]:
    """Reward, staleness and how many sampled tokens cannot be trained."""
    means: dict[str, float] = {
        "tokens_stale": float(sum(_more(p.sampled, p.fresh) for p in policies)),
        "tokens_unscored": float(sum(_more(p.fresh, p.scored) - p.too_long for p in policies)),
        "tokens_too_long": float(sum(p.too_long for p in policies)),
    }
    if graded := [e for e in episodes if e.reward is not None]:
        means["reward_mean"] = float(np.mean([e.reward for e in graded]))
        means["solved"] = float(np.mean([e.outcome == "solved" for e in graded]))
    lags = np.concatenate([p.lags for p in policies]) if policies else np.zeros(0)
    if len(lags):
        means["staleness_mean"], means["staleness_max"] = float(lags.mean()), float(lags.max())
    return means


def _more(larger: Bools, smaller: Bools) -> int:
    """How many are in the first and not in the second, which has no others."""
    return int(np.count_nonzero(larger) - np.count_nonzero(smaller))
