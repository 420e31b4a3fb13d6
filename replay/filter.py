"""Which episodes of a journal somebody wants."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from hintloop.replay.episode import NOT_SAMPLED, Episode


@dataclass(frozen=True, slots=True)
class Filter:
    """An episode passes when it passes every condition; one that is left out lets all pass."""

    sources: tuple[str, ...] = ()
    """``Episode.source`` is one of these."""
    outcomes: tuple[str, ...] = ()
    """``Episode.outcome`` is one of these."""
    tasks: tuple[str, ...] = ()
    """``Episode.task_id`` matches one of these patterns, such as ``bugfix/*``."""
    models: tuple[str, ...] = ()
    """``Episode.model`` matches one of these patterns."""
    max_lag: int | None = None
    """So many versions behind the reader's is the oldest sampled token at most. What no policy of this program
    sampled, such as a recording, has no version and passes."""

    def passes(self, episode: Episode, version: int | None = None) -> bool:
        """``version`` is what ``max_lag`` counts from; ``ValueError`` when it is needed and missing."""
        if self.max_lag is not None and version is None:
            raise ValueError("max_lag needs the version that it counts from")
        return (
            (not self.sources or episode.source in self.sources)
            and (not self.outcomes or episode.outcome in self.outcomes)
            and _like(episode.task_id, self.tasks)
            and _like(episode.model, self.models)
            and (
                self.max_lag is None or version is None or version - _oldest(episode, version) <= self.max_lag
            )
        )


def _like(text: str, patterns: Iterable[str]) -> bool:
    return not patterns or any(fnmatchcase(text, pattern) for pattern in patterns)


def _oldest(episode: Episode, default: int) -> int:
    return min((each for each in episode.policy_versions if each != NOT_SAMPLED), default=default)
