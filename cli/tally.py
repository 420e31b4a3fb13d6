"""One pass over a journal: what the episodes of a run were, in numbers, and two worth showing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from hintloop.replay.episode import NOT_SAMPLED, Episode, Outcome


@dataclass(frozen=True, slots=True)
class GroupPoint:
    """One group on the reward curve."""

    time: float
    """When its last episode ended, Unix time."""
    version: int
    """Oldest weights that it was played with."""
    reward: float
    """Mean."""
    solved: float
    """Share."""


@dataclass(slots=True)
class Tally:
    """Sums over all episodes that were added."""

    episodes: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    turns: int = 0
    sampled_tokens: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    """Tool errors by kind."""
    model_errors: int = 0
    """Those that were the agent's own doing."""
    hint_sites: Counter[str] = field(default_factory=Counter)
    """By kind of the error."""
    pairs: int = 0
    verified_pairs: int = 0
    groups: list[GroupPoint] = field(default_factory=list)
    equal_groups: int = 0
    """Those whose rewards are all equal: they teach nothing by them."""
    recovered: Episode | None = None
    """The newest episode that was solved although a turn of it went wrong."""
    unrecovered: Episode | None = None
    """The oldest one that was not."""

    def add_group(self, episodes: list[Episode]) -> None:
        """Count one group of at least one episode."""
        for episode in episodes:
            self._add(episode)
        rewards = [episode.reward for episode in episodes if episode.reward is not None]
        self.equal_groups += len(rewards) > 1 and len(set(rewards)) == 1
        sampled = [v for episode in episodes for v in episode.policy_versions if v != NOT_SAMPLED]
        solved = sum(episode.outcome is Outcome.SOLVED for episode in episodes)
        self.groups.append(
            GroupPoint(
                time=max(episode.created_at for episode in episodes),
                version=min(sampled, default=0),
                reward=sum(rewards) / len(rewards) if rewards else 0.0,
                solved=solved / len(episodes),
            )
        )

    def _add(self, episode: Episode) -> None:
        self.episodes += 1
        self.outcomes[str(episode.outcome)] += 1
        self.sampled_tokens += sum(episode.loss_mask)
        for turn in episode.turns:
            self.turns += turn.role == "assistant"
            if turn.error_kind:
                self.errors[turn.error_kind] += 1
                self.model_errors += turn.error_cause == "model"
        self.hint_sites.update(site.kind for site in episode.hint_sites)
        self.pairs += len(episode.pairs)
        self.verified_pairs += sum(pair.verified for pair in episode.pairs)
        if episode.hint_sites and episode.outcome is Outcome.SOLVED:
            self.recovered = episode
        elif episode.hint_sites and self.unrecovered is None:
            self.unrecovered = episode


def tally(segments: Iterable[list[Episode]]) -> Tally:
    """Count all episodes, segment by segment; a segment holds whole groups."""
    made = Tally()
    for segment in segments:
        by_group: dict[str, list[Episode]] = {}
        for episode in segment:
            by_group.setdefault(episode.group_id, []).append(episode)
        for group in by_group.values():
            made.add_group(group)
    made.groups.sort(key=lambda point: point.time)
    return made
