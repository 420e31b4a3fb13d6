"""What the teachers may cost: every call's worst case is set aside before it, its real cost booked after it.

The ledger is an append-only file of JSON lines that one process at a time may hold. A reservation is on disk
before its call is made, so one that was open when the process died counts as spent: the caps hold over any
number of crashes. Amounts are whole nano-dollars, rounded up.

The balance is in memory, and one thread writes the lines in their order: nobody but who waits for a reservation
ever waits for the disk.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import math
import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

NANO = 10**9
NUM_EPISODES = 10_000
"""Episodes whose spending is remembered, the newest; far more than are played at the same time."""
CLOSE_S = 10.0
"""How long ``close`` waits for a disk that does not answer."""


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


@dataclass(frozen=True, slots=True)
class _Line:
    """A line to write, and who waits for it to be on the disk."""

    data: bytes
    made: Reservation
    waiting: Future[Reservation] | None


class Ledger:
    """Opens, or goes on with, the ledger at ``path``. Threads may share it, the event loop's own among them.

    ``budget_usd`` is for all that this file ever books, ``episode_budget_usd`` for one episode; None: no cap.
    Waits for the disk. Raises ``LedgerFailed``, also when another process holds it. A call that costs more than was
    reserved for it is booked in full and counted in ``overruns``; nothing but that can exceed a cap. ``unwritten``
    counts the costs that the disk did not take.
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
        """For the balance; never held while the disk is waited for."""
        self._open: dict[int, Reservation] = {}
        self._reserved = 0
        self._next = 0
        self._closed = False
        self._over = False
        """The writer takes no more lines."""
        self._broken: LedgerFailed | None = None
        self._lines: SimpleQueue[_Line | None] = SimpleQueue()
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
        # Not of a pool: the end of the process would wait for it, and with it for a disk that hangs.
        self._writer = threading.Thread(target=self._write_all, name="ledger", daemon=True)
        self._writer.start()

    def reserve(self, episode: str, usd: float) -> Reservation:
        """Set ``usd`` aside for a call. Raises ``OverBudget`` or ``LedgerFailed``; the call must then not be made.

        Waits for the disk.
        """
        return self.hold(episode, usd).result()

    def hold(self, episode: str, usd: float) -> Future[Reservation]:
        """The same without the wait: the call may be made when the future has its result, not before.

        Until then the amount counts as set aside. Raises like ``reserve``; a disk that fails is in the future.
        """
        amount, waiting = _nano(usd), Future[Reservation]()
        waiting.set_running_or_notify_cancel()  # nobody can cancel it, as its line may be on the disk
        with self._lock:
            self._check(episode, amount)
            made = Reservation(self._next, episode, amount)
            if amount:
                self._next += 1
                self._open[made.number] = made
                self._reserved += amount
                self._put({"open": made.number, "episode": episode, "nusd": amount}, made, waiting)
            else:
                waiting.set_result(made)
        return waiting

    def settle(self, reservation: Reservation, usd: float) -> None:
        """Book what the call did cost; does not wait for the disk.

        Never raises for the file: a cost that is not written counts with its worst case after a restart.
        """
        amount = _nano(usd)
        with self._lock:
            if reservation.nano_usd:
                del self._open[reservation.number]
                self._reserved -= reservation.nano_usd
            elif not amount:
                return
            self.overruns += amount > reservation.nano_usd
            self._spent += amount
            _book(self._episodes, reservation.episode, amount)
            line = {"close": reservation.number, "nusd": amount, "episode": reservation.episode}
            self._put(line, reservation, None)

    @property
    def spent_usd(self) -> float:
        """Booked so far, in this and all earlier processes."""
        return self._spent / NANO

    @property
    def reserved_usd(self) -> float:
        """Worst case of the calls under way."""
        return self._reserved / NANO

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
        """Write what is left and let others have the file; they have to wait while the disk does not answer."""
        with self._lock:
            self._closed = True
        self._lines.put(None)
        self._writer.join(CLOSE_S)

    def _check(self, episode: str, amount: int) -> None:
        if not amount:
            return
        if self._closed:
            raise LedgerFailed(f"the ledger {self.path} is closed")
        if self._cap is not None and self._spent + self._reserved + amount > self._cap:
            raise OverBudget(f"the call may cost {amount / NANO:.6f} USD, more than is left of the budget")
        own = sum(one.nano_usd for one in self._open.values() if one.episode == episode)
        own += self._episodes.get(episode, 0)
        if self._episode_cap is not None and own + amount > self._episode_cap:
            raise OverBudget(
                f"the call may cost {amount / NANO:.6f} USD, more than is left of its episode's budget"
            )

    def _put(self, line: dict[str, Any], made: Reservation, waiting: Future[Reservation] | None) -> None:
        """Have a line written, behind those before it; to be called with the lock."""
        if self._over:
            self.unwritten += 1
        else:
            self._lines.put(_Line(json.dumps(line).encode() + b"\n", made, waiting))

    def _write_all(self) -> None:
        """The writer's thread: what has come meanwhile is written with one wait for the disk."""
        closing = False
        while not self._over:
            lines = [self._lines.get()]
            with contextlib.suppress(Empty):
                while True:
                    lines.append(self._lines.get_nowait())
            closing = closing or None in lines
            self._write([line for line in lines if line is not None])
            with self._lock:
                self._over = closing and self._lines.empty()
        os.close(self._file)
        os.close(self._held)

    def _write(self, lines: Sequence[_Line]) -> None:
        """Each line whole or not at all; those that somebody waits for are then on the disk."""
        begin, written = self._size, list[_Line]()
        for line in lines:
            failed = self._append(line.data)
            if failed is None:
                written.append(line)
            else:
                self._tell(line, failed)
        failed = None
        if any(line.waiting is not None for line in written):
            try:
                os.fsync(self._file)
            except OSError as error:
                failed = self._cut(begin, error)
        for line in written:
            self._tell(line, failed)

    def _append(self, data: bytes) -> LedgerFailed | None:
        if self._broken is not None:
            return self._broken
        try:
            if os.write(self._file, data) < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            return self._cut(self._size, error)
        self._size += len(data)
        return None

    def _cut(self, size: int, error: OSError) -> LedgerFailed:
        """Take back what is behind ``size``, which was not written well."""
        failed = LedgerFailed(f"cannot write the ledger {self.path}: {error.strerror}")
        try:
            os.ftruncate(self._file, size)
            self._size = size
        except OSError:
            self._broken = failed  # half a line may be there, and the next would be lost behind it
        return failed

    def _tell(self, line: _Line, failed: LedgerFailed | None) -> None:
        """What became of a line."""
        if line.waiting is None:
            self.unwritten += failed is not None
        elif failed is None:
            line.waiting.set_result(line.made)
        else:
            with self._lock:
                del self._open[line.made.number]
                self._reserved -= line.made.nano_usd
            line.waiting.set_exception(failed)


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
