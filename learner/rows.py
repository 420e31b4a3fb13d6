"""From episodes to rows: which tokens each of the three channels trains on, and at which positions.

Everything is indices into the recorded token ids; nothing is re-tokenised. Token p is predicted by the state
at p - 1 of its own row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from hintloop.replay.episode import NOT_SAMPLED, Episode, HintSite, PreferencePair

Ints = npt.NDArray[np.integer[Any]]
"""Token ids in int32, as the journal has them; indices in int64."""
Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float32]

STD_FLOOR = 1e-4
"""Added to the standard deviation of a group's rewards, as in TRL."""


@dataclass(frozen=True, slots=True)
class Policy:
    """What an episode's tokens are worth to the learner; arrays of the episode's length."""

    ids: Ints
    logprobs: Floats
    """As recorded."""
    sampled: Bools
    fresh: Bools
    """Sampled, and by weights that are recent enough."""
    scored: Bools
    """Fresh, not the first token, with a finite recorded log-probability: a ratio can be formed. Below the cap."""
    too_long: int
    """Number of tokens that would be ``scored``, were they not beyond the cap."""
    lags: Ints
    """Versions between sampling and now, of the sampled tokens only."""


@dataclass(frozen=True, slots=True)
class HintContext:
    """A hinted context with the tokens of the turn behind it, and the K positions that are compared."""

    prompt: Ints
    """What is before the hint, as it is in the student's row."""
    hint: Ints
    turn: Ints
    """What is behind the hint, the compared tokens included."""
    student_index: Ints
    """(K,): states of the student's row that predict the compared tokens; see ``is_cut``."""
    logprobs: Floats
    """(K,): of the compared tokens, by the policy that sampled; NaN where it is unknown."""
    is_cut: bool = False
    """Both contexts lack their beginning, so that the student needs a row of its own: ``student``."""

    def __len__(self) -> int:
        return len(self.prompt) + len(self.hint) + len(self.turn)

    @property
    def hinted(self) -> Ints:
        """The hint, and the turn behind it."""
        return np.concatenate([self.hint, self.turn])

    @property
    def teacher_index(self) -> Ints:
        """(K,): states of the hinted context that predict the compared tokens."""
        return self.student_index + len(self.hint)

    @property
    def targets(self) -> Ints:
        """(K,): the compared tokens, as the teacher has them."""
        return self.turn[self.student_index + (1 - len(self.prompt))]

    @property
    def student(self) -> Ints:
        """The same without the hint."""
        return np.concatenate([self.prompt, self.turn])

    @property
    def foreign(self) -> tuple[Ints, ...]:
        """What does not come from the episode's tokens."""
        return (self.hint,)


@dataclass(frozen=True, slots=True)
class PairContext:
    """A preference pair: a prompt, and either response to it."""

    prompt: Ints
    chosen: Ints
    rejected: Ints
    is_cut: bool = False
    """The prompt lacks its beginning, so that it shares nothing with the episode's row."""

    def __len__(self) -> int:
        return len(self.prompt) + max(map(len, self.responses))

    @property
    def responses(self) -> tuple[Ints, Ints]:
        """Chosen, rejected."""
        return self.chosen, self.rejected

    @property
    def foreign(self) -> tuple[Ints, ...]:
        """What does not come from the episode's tokens."""
        return self.responses


@dataclass(frozen=True, slots=True)
class Row:
    """What the channels need of one episode; or one site, or one pair, whose context is cut."""

    ids: Ints
    """The whole episode; the cut context of a site or a pair."""
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


def policy_of(
    episode: Episode,
    *,
    version: int,
    max_staleness: int | None,
    max_tokens: int | None = None,
    ids: Ints | None = None,
) -> Policy:
    """Which tokens of an episode may be trained when the weights are at ``version``.

    ``ids`` are the episode's tokens, where they exist as an array already. Tokens from index ``max_tokens`` on
    are not scored; a hint may still use them, in a context that is cut.
    """
    ids, versions = integers(episode.token_ids) if ids is None else ids, integers(episode.policy_versions)
    logprobs, sampled = np.asarray(episode.logprobs, np.float32), np.asarray(episode.loss_mask) != 0
    known = versions != NOT_SAMPLED  # foreign tokens have no version
    fresh = sampled if max_staleness is None else sampled & (~known | (versions >= version - max_staleness))
    scored = fresh & np.isfinite(logprobs) & known
    scored[:1] = False
    too_long = 0
    if max_tokens is not None:
        too_long = int(np.count_nonzero(scored[max_tokens:]))
        scored[max_tokens:] = False
    # A recorded journal may be newer than the weights that learn from it.
    lags = np.maximum(version - versions[sampled], 0) * known[sampled]
    return Policy(ids, logprobs, sampled, fresh, scored, too_long, lags)


def integers(values: Sequence[int]) -> Ints:
    """As an array."""
    return np.asarray(values, dtype=np.int32)


def recovery_of(episode: Episode, site: HintSite) -> HintSite | None:
    """The site moved to the next assistant turn, the hint directly before it; None when there is no such turn.

    The context is the original one, the failing turn and its error included. The generation prompt of the
    next turn has to be that of the failing turn, since its length is what tells where it begins.
    """
    turn = next((t for t in episode.turns if t.role == "assistant" and t.start >= site.end), None)
    if turn is None or not 0 <= site.insert_at <= site.start:
        return None
    insert_at = turn.start - (site.start - site.insert_at)
    opening = episode.token_ids[site.insert_at : site.start]
    if insert_at < site.end or episode.token_ids[insert_at : turn.start] != opening:
        return None
    return replace(site, turn=episode.turns.index(turn), insert_at=insert_at, start=turn.start, end=turn.end)


def hint_context(
    episode: Episode, site: HintSite, fresh: Bools, ids: Ints | None = None
) -> HintContext | None:
    """The hinted context of a site; None when it has no fresh token or its indices make no sense.

    ``ids`` are the episode's tokens, where they exist as an array already.
    """
    if not 0 <= site.insert_at <= site.start < site.end <= len(episode.token_ids) or site.start < 1:
        return None
    ids = integers(episode.token_ids) if ids is None else ids
    tokens = np.flatnonzero(fresh[site.start : site.end]) + site.start
    if not len(tokens):
        return None
    logprobs = np.asarray(episode.logprobs, dtype=np.float32)[tokens]
    versions = integers(episode.policy_versions)[tokens]
    return HintContext(
        prompt=ids[: site.insert_at],
        hint=integers(site.hint_ids),
        turn=ids[site.insert_at : site.end],
        student_index=tokens - 1,
        logprobs=np.where(np.isfinite(logprobs) & (versions != NOT_SAMPLED), logprobs, np.float32(np.nan)),
    )


def pair_context(episode: Episode, pair: PreferencePair, ids: Ints | None = None) -> PairContext | None:
    """Both sides of a pair; None when a response is empty, the two are equal or the prompt does not exist.

    ``ids`` are the episode's tokens, where they exist as an array already.
    """
    if not 1 <= pair.prompt_end <= len(episode.token_ids) or not pair.chosen_ids or not pair.rejected_ids:
        return None
    if pair.chosen_ids == pair.rejected_ids:
        return None
    prompt = (integers(episode.token_ids) if ids is None else ids)[: pair.prompt_end]
    return PairContext(prompt, integers(pair.chosen_ids), integers(pair.rejected_ids))


def cut_site(site: HintContext, max_tokens: int) -> HintContext | None:
    """The site with a hinted context of at most ``max_tokens``; None when hint and turn alone are longer.

    Both contexts lose the same beginning, so that they still differ in nothing but the hint. The student's is
    then no part of the episode's row, and becomes a row of its own.
    """
    lost = len(site) - max_tokens
    if lost <= 0:
        return site
    if lost > min(len(site.prompt), int(site.student_index[0])):
        return None
    return replace(site, prompt=site.prompt[lost:], student_index=site.student_index - lost, is_cut=True)


def cut_pair(pair: PairContext, max_tokens: int) -> PairContext | None:
    """The pair with sides of at most ``max_tokens``; None when a response leaves no room for a prompt token.

    Both sides lose the same beginning of their prompt.
    """
    lost = len(pair) - max_tokens
    if lost <= 0:
        return pair
    if lost >= len(pair.prompt):
        return None
    return replace(pair, prompt=pair.prompt[lost:], is_cut=True)


def rows_of(
    episode: Episode,
    advantage: float | None,
    policy: Policy,
    sites: Sequence[HintContext] = (),
    pairs: Sequence[PairContext] = (),
) -> list[Row]:
    """The row of an episode, if a channel has a token in it, and one of its own for each context that is cut."""
    whole = row_of(
        episode, advantage, policy, [s for s in sites if not s.is_cut], [p for p in pairs if not p.is_cut]
    )
    return [
        *([whole] if whole else []),
        *(_apart(s.student, int(s.student_index[-1]) + 1, sites=(s,)) for s in sites if s.is_cut),
        *(_apart(p.prompt, 0, pairs=(p,)) for p in pairs if p.is_cut),
    ]


def _apart(
    ids: Ints, keep: int, sites: tuple[HintContext, ...] = (), pairs: tuple[PairContext, ...] = ()
) -> Row:
    return Row(ids, keep, np.zeros(keep, dtype=np.bool_), np.zeros(keep, dtype=np.float32), 0.0, sites, pairs)


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
    logprobs = np.where(trained, policy.logprobs[:keep], np.float32(0.0))
    return Row(policy.ids, keep, trained, logprobs, float(advantage or 0.0), tuple(sites), tuple(pairs))
