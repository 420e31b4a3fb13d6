"""How failures of a storage are put up with: what the rollout side and the learner have in common."""

from __future__ import annotations

import random
from collections.abc import Iterator

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 10.0


class StorageFailed(OSError):
    """A storage failed for longer than anybody is willing to wait."""


def pauses() -> Iterator[float]:
    """Seconds to wait after each failure: more each time, and not the same for all who wait."""
    pause = FIRST_PAUSE_S
    while True:
        yield pause * (0.5 + random.random())
        pause = min(2 * pause, LONGEST_PAUSE_S)


def too_long(what: str, patience_s: float, last: OSError | None) -> StorageFailed:
    """What to raise when patience is over; ``last`` is the newest failure, None for a call without an answer."""
    why = "it does not answer" if last is None else last.strerror or str(last)
    return StorageFailed(f"{what} failed for {patience_s:g} s: {why}")
