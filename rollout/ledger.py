"""What the teachers may cost: every call's worst case is set aside before it, its real cost booked after it.

The ledger is an append-only file of JSON lines that one process at a time may hold. A reservation is on disk
before its call is made, so one that was open when the process died counts as spent: the caps hold over any
number of crashes. Amounts are whole nano-dollars, rounded up.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import threading
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NANO = 10**9
NUM_EPISODES = 10_000
"""Episodes whose spending is remembered, the newest; far more than are played at the same time."""


class OverBudget(Exception):
    """The call could cost more than is left."""


class LedgerFailed(OSError):
    """The ledger cannot be read, written or locked; nothing may be spent then."""


@dataclass(frozen=True, slots=True)
class Reservation:
    """The worst case of one call."""

    number: int
    episode: str
    nano_usd: int


class Ledger:
    """Opens, or goes on with, the ledger at ``path``. Threads may share it.

    ``budget_usd`` is for all that this file ever books, ``episode_budget_usd`` for one episode; None: no cap.
    Raises ``LedgerFailed``, also when another process holds it. A call that costs more than was reserved for
    it is booked in full and counted in ``overruns``; nothing but that can exceed a cap. ``unwritten`` counts the
    costs that the disk did not take.
    """

    def __init__(
        self, path: Path, *, budget_usd: float | None = None, episode_budget_usd: float | None = None
    ) -> None:
        self.path = path
        self.overruns = 0
        self.unwritten = 0
        self._cap = None if budget_usd is None else math.floor(budget_usd * NANO)
        self._episode_cap = None if episode_budget_usd is None else math.floor(episode_budget_usd * NANO)
        self._lock = threading.Lock()
        self._open: dict[int, Reservation] = {}
        self._next = 0
        self._broken: LedgerFailed | None = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._held = _hold(path.with_name(f"{path.name}.lock"))
            try:
                self._spent, self._episodes = _balance(path)
                self._file = _begin(path, self._spent, self._episodes)
            except BaseException:
                os.close(self._held)
                raise
        except LedgerFailed:
            raise
        except OSError as error:
            raise LedgerFailed(f"cannot write the ledger {path}: {error.strerror}") from error
        self._size = os.fstat(self._file).st_size

    def reserve(self, episode: str, usd: float) -> Reservation:
        """Set ``usd`` aside for a call. Raises ``OverBudget`` or ``LedgerFailed``; the call must then not be made."""
        amount = _nano(usd)
        with self._lock:
            self._check(episode, amount)
            made = Reservation(self._next, episode, amount)
            if amount:
                self._append({"open": made.number, "episode": episode, "nusd": amount}, durable=True)
                self._open[made.number] = made
                self._next += 1
        return made

    def settle(self, reservation: Reservation, usd: float) -> None:
        """Book what the call did cost. Never raises for the file: an unbooked call counts with its worst case."""
        amount = _nano(usd)
        with self._lock:
            if reservation.nano_usd:
                self._open.pop(reservation.number)
            elif not amount:
                return
            self.overruns += amount > reservation.nano_usd
            self._spent += amount
            _book(self._episodes, reservation.episode, amount)
            try:
                line = {"close": reservation.number, "nusd": amount, "episode": reservation.episode}
                self._append(line, durable=False)
            except LedgerFailed:
                self.unwritten += 1

    @property
    def spent_usd(self) -> float:
        """Booked so far, in this and all earlier processes."""
        return self._spent / NANO

    @property
    def reserved_usd(self) -> float:
        """Worst case of the calls under way."""
        with self._lock:
            return sum(held.nano_usd for held in self._open.values()) / NANO

    def snapshot(self) -> dict[str, Any]:
        """The balance as JSON data."""
        reserved = self.reserved_usd
        left = None if self._cap is None else max(self._cap / NANO - self.spent_usd - reserved, 0.0)
        return {
            "spent_usd": round(self.spent_usd, 6),
            "reserved_usd": round(reserved, 6),
            "left_usd": None if left is None else round(left, 6),
            "overruns": self.overruns,
            "unwritten": self.unwritten,
        }

    def close(self) -> None:
        """Let others have the file."""
        with self._lock:
            if self._held >= 0:
                os.close(self._file)
                os.close(self._held)
                self._held = -1
                self._broken = LedgerFailed(f"the ledger {self.path} is closed")

    def _check(self, episode: str, amount: int) -> None:
        if not amount:
            return
        if self._broken is not None:
            raise self._broken
        held = sum(one.nano_usd for one in self._open.values())
        if self._cap is not None and self._spent + held + amount > self._cap:
            raise OverBudget(f"the call may cost {amount / NANO:.6f} USD, more than is left of the budget")
        own = sum(one.nano_usd for one in self._open.values() if one.episode == episode)
        own += self._episodes.get(episode, 0)
        if self._episode_cap is not None and own + amount > self._episode_cap:
            raise OverBudget(
                f"the call may cost {amount / NANO:.6f} USD, more than is left of its episode's budget"
            )

    def _append(self, line: dict[str, Any], *, durable: bool) -> None:
        """One line, whole or not at all."""
        if self._broken is not None:
            raise self._broken
        data = json.dumps(line).encode() + b"\n"
        try:
            if os.write(self._file, data) < len(data):
                raise OSError(28, "No space left on device")
            if durable:
                os.fsync(self._file)
        except OSError as error:
            failed = LedgerFailed(f"cannot write the ledger {self.path}: {error.strerror}")
            try:
                os.ftruncate(self._file, self._size)
            except OSError:
                self._broken = failed  # half a line may be there, and the next would be lost behind it
            raise failed from error
        self._size += len(data)


def _nano(usd: float) -> int:
    if not (math.isfinite(usd) and usd >= 0):
        raise ValueError(f"{usd} is no amount of money")
    return math.ceil(usd * NANO)


def _hold(path: Path) -> int:
    """A locked file, which stays locked as long as this process lives and leaves it open."""
    held = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(held)
        raise LedgerFailed(f"another process holds the ledger {path.with_suffix('')}") from None
    return held


def _book(episodes: OrderedDict[str, int], episode: str, amount: int) -> None:
    episodes[episode] = episodes.pop(episode, 0) + amount
    while len(episodes) > NUM_EPISODES:
        episodes.popitem(last=False)


def _balance(path: Path) -> tuple[int, OrderedDict[str, int]]:
    """What the file says was spent, in all and by episode. What nobody settled is spent."""
    spent, episodes = 0, OrderedDict[str, int]()
    opened: dict[int, Reservation] = {}
    *lines, _torn = path.read_bytes().split(b"\n") if path.exists() else [b""]
    for number, text in enumerate(lines, 1):
        try:
            line = json.loads(text)
            if "spent" in line:
                spent, episodes = int(line["spent"]), OrderedDict(line["episodes"])
                continue
            if "open" in line:
                opened[line["open"]] = Reservation(line["open"], line["episode"], int(line["nusd"]))
                continue
            opened.pop(line["close"], None)
            amount, episode = int(line["nusd"]), line["episode"]
        except (ValueError, KeyError, TypeError):
            raise LedgerFailed(f"line {number} of the ledger {path} is damaged") from None
        spent += amount
        _book(episodes, episode, amount)
    for held in opened.values():
        spent += held.nano_usd
        _book(episodes, held.episode, held.nano_usd)
    return spent, episodes


def _begin(path: Path, spent: int, episodes: OrderedDict[str, int]) -> int:
    """Replace the file by its balance, in one piece, and open it to append."""
    part = path.with_name(f".{path.name}.part")
    with part.open("wb") as file:
        file.write(json.dumps({"spent": spent, "episodes": episodes}).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
