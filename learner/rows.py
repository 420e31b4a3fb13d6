"""From episodes to rows: which tokens each of the three channels trains on, and at which positions.

Everything is indices into the recorded token ids; nothing is re-tokenised. Token p is predicted by the state
at p - 1 of its own row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hintloop.replay.episode import NOT_SAMPLED, Episode, HintSite, PreferencePair

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float32]

STD_FLOOR = 1e-4
"""Added to the standard deviation of a group's rewards, as in TRL."""


@dataclass(frozen=True, slots=True)
class Policy:
    """What an episode's tokens are worth to the learner; arrays of the episode's length."""

    sampled: Bools
    fresh: Bools
    """Sampled, and by weights that are recent enough."""
    scored: Bools
    """Fresh, not the first token, with a finite recorded log-probability: a ratio can be formed."""
    lags: Ints
    """Versions between sampling and now, of the sampled tokens only."""


@dataclass(frozen=True, slots=True)
class HintContext:
    """A hinted context with the tokens of the turn behind it, and the K positions that are compared."""

    ids: Ints
    student_index: Ints
    """(K,): states of the episode that predict the compared tokens."""
    teacher_index: Ints
    """(K,): states of ``ids`` that predict the same tokens."""

    @property
    def sequences(self) -> tuple[Ints, ...]:
        return (self.ids,)


@dataclass(frozen=True, slots=True)
class PairContext:
    """A preference pair: a shared prompt of ``prompt_end`` tokens with either response behind it."""

    chosen: Ints
    rejected: Ints
    prompt_end: int

    @property
    def sequences(self) -> tuple[Ints, ...]:
        return (self.chosen, self.rejected)


@dataclass(frozen=True, slots=True)
class Row:
    """What the channels need of one episode."""

    ids: Ints
    """The whole episode."""
    keep: int
    """States that the policy loss and the hints need, from the first one on."""
    trained: Bools
    """(keep,): tokens of the policy loss; all False when the advantage is 0."""
    logprobs: Floats
    """(keep,): recorded by the policy that sampled; 0 elsewhere."""
    advantage: float
    sites: tuple[HintContext, ...] = ()
    pairs: tuple[PairContext, ...] = ()


def group_advantages(rewards: Sequence[float | None]) -> list[float | None]:
    """``(r - mean) / (std + 1e-4)`` within one group, std with n - 1; None for an episode that has no vote.

    An ungraded episode (None) counts nowhere, and a group with fewer than two graded ones has no advantages.
    """
    graded = [reward for reward in rewards if reward is not None]
    if len(graded) < 2:
        return [None] * len(rewards)
    mean, std = float(np.mean(graded)), float(np.std(graded, ddof=1))
    return [None if reward is None else (reward - mean) / (std + STD_FLOOR) for reward in rewards]


def policy_of(episode: Episode, *, version: int, max_staleness: int | None) -> Policy:
    """Which tokens of an episode may be trained when the weights are at ``version``."""
    sampled = np.asarray(episode.loss_mask, dtype=np.bool_)
    versions = np.asarray(episode.policy_versions, dtype=np.int64)
    # A recorded journal may be newer than the weights that learn from it, and foreign tokens have no version.
    lags = np.where(versions == NOT_SAMPLED, 0, np.maximum(version - versions, 0))
    fresh = sampled & (lags <= (math.inf if max_staleness is None else max_staleness))
    known = np.isfinite(np.asarray(episode.logprobs, dtype=np.float32)) & (versions != NOT_SAMPLED)
    scored = fresh & known
    scored[:1] = False
    return Policy(sampled, fresh, scored, lags[sampled])


def hint_context(episode: Episode, site: HintSite, fresh: Bools) -> HintContext | None:
    """The hinted context of a site; None when it has no fresh token or its indices make no sense."""
    if not 0 <= site.insert_at <= site.start < site.end <= len(episode.token_ids) or site.start < 1:
        return None
    ids = np.asarray(episode.token_ids, dtype=np.int64)
    hint = np.asarray(site.hint_ids, dtype=np.int64)
    tokens = np.arange(site.start, site.end)[fresh[site.start : site.end]]
    hinted = np.concatenate([ids[: site.insert_at], hint, ids[site.insert_at : site.end]])
    if not len(tokens):
        return None
    assert (ids[tokens] == hinted[tokens + len(hint)]).all(), (
        "student and teacher must predict the same tokens"
    )
    return HintContext(hinted, tokens - 1, tokens - 1 + len(hint))


def pair_context(episode: Episode, pair: PreferencePair) -> PairContext | None:
    """Both sides of a pair; None when a response is empty, the two are equal or the prompt does not exist."""
    if not 1 <= pair.prompt_end <= len(episode.token_ids) or not pair.chosen_ids or not pair.rejected_ids:
        return None
    if pair.chosen_ids == pair.rejected_ids:
        return None
    prompt = episode.token_ids[: pair.prompt_end]
    chosen, rejected = (np.asarray(prompt + r, dtype=np.int64) for r in (pair.chosen_ids, pair.rejected_ids))
    return PairContext(chosen, rejected, pair.prompt_end)


def row_of(
    episode: Episode,
    advantage: float | None,
    policy: Policy,
    sites: Sequence[HintContext] = (),
    pairs: Sequence[PairContext] = (),
) -> Row | None:
    """The row of an episode; None when no channel has a token in it, so that it need not be computed."""
    votes = advantage is not None and advantage != 0.0
    trained = policy.scored if votes else np.zeros_like(policy.scored)
    needed = [*np.flatnonzero(trained)[-1:], *(int(site.student_index[-1]) for site in sites)]
    if not needed and not pairs:
        return None
    keep = int(max(needed, default=-1)) + 1
    trained = trained[:keep]
    logprobs = np.where(trained, np.asarray(episode.logprobs[:keep], dtype=np.float32), np.float32(0.0))
    ids = np.asarray(episode.token_ids, dtype=np.int64)
    return Row(ids, keep, trained, logprobs, float(advantage or 0.0), tuple(sites), tuple(pairs))
