"""Going on when the storage of journal or weights fails for a while."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import structlog

from hintloop.learner.source import POLL_SECONDS, ReadableJournal, SegmentReader
from hintloop.replay.episode import Episode
from hintloop.replay.journal import Segment
from hintloop.replay.patience import StorageFailed, pauses, too_long
from hintloop.replay.weights import Manifest, WeightStore

READING = "reading the journal"
T = TypeVar("T")
_log = structlog.get_logger(__name__)


class GivenUp(StorageFailed):
    """Somebody has asked to stop while a storage was failing."""


class Patience:
    """Tries calls to a storage again while it fails. A call that does not return is waited for."""

    def __init__(self, limit_s: float, stopped: Callable[[], bool] = lambda: False) -> None:
        """``limit_s``: how long a call may fail, from its first failure. ``stopped`` ends a wait."""
        self._limit_s, self._stopped = limit_s, stopped
        self.waiting: Callable[[str], None] = lambda what: None
        """Called every ``POLL_SECONDS`` of a wait with what is tried again."""

    def __call__(self, what: str, call: Callable[[], T]) -> T:
        """What ``call`` returns.

        Raises ``StorageFailed`` when patience is over, ``GivenUp`` when stopped, and at once what no second try can
        change: ``FileExistsError`` and whatever is no ``OSError``.
        """
        pause = pauses()
        deadline: float | None = None
        while True:
            try:
                return call()
            except (FileExistsError, StorageFailed):
                raise
            except OSError as error:
                _log.warning("storage_failed", what=what, error=repr(error))
                now = time.monotonic()
                deadline = now + self._limit_s if deadline is None else deadline
                if now >= deadline:
                    raise too_long(what, self._limit_s, error) from error
                self._wait(what, min(now + next(pause), deadline), error)

    def _wait(self, what: str, until: float, failure: OSError) -> None:
        while (left := until - time.monotonic()) > 0:
            if self._stopped():
                raise GivenUp(f"{what} was given up: {failure.strerror or failure}") from failure
            self.waiting(what)
            time.sleep(min(left, POLL_SECONDS))


class PatientJournal:
    """A journal that is read with patience."""

    def __init__(self, journal: ReadableJournal, patience: Patience) -> None:
        self.uri = journal.uri
        self._journal, self._patience = journal, patience

    def reader(self, position: Mapping[str, int] | None = None) -> SegmentReader:
        """As in ``Journal``."""
        return _PatientReader(self._patience(READING, lambda: self._journal.reader(position)), self._patience)

    def read(self, segment: str) -> list[Episode]:
        """As in ``Journal``."""
        return self._patience(READING, lambda: self._journal.read(segment))


class _PatientReader:
    """A reader that a failure leaves where it was."""

    def __init__(self, reader: SegmentReader, patience: Patience) -> None:
        self._reader, self._patience = reader, patience
        self.damaged = reader.damaged

    @property
    def position(self) -> dict[str, int]:
        return self._reader.position

    def poll_segment(self) -> Segment | None:
        return self._patience(READING, self._reader.poll_segment)


class PatientWeights:
    """What a learner does with a weight store, with patience."""

    def __init__(self, store: WeightStore, patience: Patience) -> None:
        self.uri = store.uri
        self._store, self._patience = store, patience

    def latest(self) -> Manifest | None:
        """As in ``WeightStore``."""
        return self._patience("looking for weights", self._store.latest)

    def publish(self, version: int, folder: Path, *, metadata: dict[str, Any]) -> Manifest:
        """As in ``WeightStore``."""
        return self._patience(
            f"publishing version {version}",
            lambda: self._store.publish(version, folder, metadata=metadata),
        )

    def prune(self, keep: int) -> list[int]:
        """As in ``WeightStore``."""
        return self._patience("deleting old weights", lambda: self._store.prune(keep))
