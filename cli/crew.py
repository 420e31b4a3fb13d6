"""The parts of a run as workers that are asked how they are, and started again when they die.

What a worker is, is the caller's: ``actors`` makes each an actor in a process of its own. Everything is crash-only, so
a part that died is simply started again: a server at the address that it had, the others where the disk says they were.
"""

from __future__ import annotations

import asyncio
import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, Protocol

import structlog

from hintloop.cli.config import Config
from hintloop.cli.main import run_command
from hintloop.cli.play import LEARNER_END_S, READY_S, learner_spec, rollout_spec, server_specs
from hintloop.cli.runfolder import RunFolder, write_text
from hintloop.cli.supervise import ChildSpec

ANSWER_S = 120.0
"""How long a worker may take to answer, the start of its process included."""
END_S = 120.0
"""How long a worker may take to end."""
MAX_RESTARTS = 3
_log = structlog.get_logger(__name__)


class Dead(Exception):
    """A worker that cannot be asked any more; says why."""


class GaveUp(Exception):
    """A part died once more than it may, or does not end."""


@dataclass(frozen=True, slots=True)
class Status:
    """What a worker does."""

    state: Literal["running", "ended", "failed"]
    pid: int
    said: str = ""
    """Why it failed."""


class Work:
    """A command of ``hintloop``, at work in a thread of this process, which no signal stops: it is killed with it."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self._arguments = list(arguments)
        self.status = Status("running", os.getpid())
        threading.Thread(target=self._run, name="work", daemon=True).start()

    def _run(self) -> None:
        pid = os.getpid()
        try:
            code = run_command(self._arguments)
        except BaseException as error:
            self.status = Status("failed", pid, repr(error))
            raise  # so that the traceback is printed
        self.status = Status("failed", pid, f"exit status {code}") if code else Status("ended", pid)


class Worker(Protocol):
    """A part of a run that was started."""

    async def status(self) -> Status:
        """What it does. Raises ``Dead``."""

    async def stop(self) -> None:
        """End its process, if there still is one."""


class Crew:
    """The workers of one run: starts them, and again when they die."""

    def __init__(
        self,
        folder: RunFolder,
        config: Config,
        start: Callable[[ChildSpec], Worker],
        *,
        max_restarts: int = MAX_RESTARTS,
    ) -> None:
        """``max_restarts``: of each part."""
        self._folder, self._config, self._start = folder, config, start
        self._max_restarts = max_restarts
        self._servers = [spec.name for spec in server_specs(folder, config)]
        self._seats = {name: _Seat() for name in (*self._servers, "learner", "rollout")}
        self._urls: dict[str, str] = {}
        self._played_at: float | None = None
        self._written: list[dict[str, Any]] = []

    async def look(self) -> bool:
        """Ask all of them, start those that are missing; whether the run is over. Raises ``GaveUp``."""
        for name, seat in self._seats.items():
            if seat.worker is None:
                self._fill(name)
            elif seat.status is None or seat.status.state == "running":
                await self._ask(name, seat)
        self._write()
        return self._is_over()

    async def stop(self) -> None:
        """End all of them, the servers last."""
        for servers in (False, True):
            seats = [seat for name, seat in self._seats.items() if (name in self._servers) is servers]
            await asyncio.gather(*(seat.end() for seat in seats))
        self._write()

    def rows(self) -> list[dict[str, Any]]:
        """One row per part, as JSON data; ``restarted`` says why it was, the last time."""
        return [
            {"part": name, **seat.row(), "restarts": len(seat.deaths), "restarted": "".join(seat.deaths[-1:])}
            for name, seat in self._seats.items()
        ]

    def _fill(self, name: str) -> None:
        """Start a part, unless it has to wait for others."""
        seat = self._seats[name]
        if name in self._servers:
            self._folder.ready(name).unlink(missing_ok=True)
            specs = server_specs(self._folder, self._config, self._urls)
            spec = next(spec for spec in specs if spec.name == name)
        elif name == "learner":
            spec = learner_spec(self._folder, self._config)
        elif len(self._urls) < len(self._servers):
            return
        else:
            spec = rollout_spec(self._folder, self._config, self._urls)
        seat.worker, seat.status, seat.started = self._start(spec), None, time.monotonic()

    async def _ask(self, name: str, seat: _Seat) -> None:
        assert seat.worker is not None
        try:
            async with asyncio.timeout(ANSWER_S):
                seat.status = await seat.worker.status()
        except Dead as error:
            why = str(error)
        except TimeoutError:
            why = f"no answer for {ANSWER_S:g} s"
        else:
            why = seat.status.said or (self._trouble(name, seat) if name in self._servers else "")
        if why:
            await self._start_again(name, seat, why)

    def _trouble(self, name: str, seat: _Seat) -> str:
        """What is wrong with a server that says nothing is; empty for nothing."""
        ready = self._folder.ready(name)
        if seat.status and seat.status.state == "ended":
            return "ended, which a server must not"
        if ready.exists():
            self._urls[name] = ready.read_text().strip()
        elif time.monotonic() - seat.started > READY_S:
            return f"not ready after {READY_S:g} s"
        return ""

    async def _start_again(self, name: str, seat: _Seat, why: str) -> None:
        await seat.end()
        seat.deaths.append(" ".join(why.split()))
        if len(seat.deaths) > self._max_restarts:
            log = self._folder.log(name)
            raise GaveUp(f"{name} died {len(seat.deaths)} times; at last: {seat.deaths[-1]} (log: {log})")
        _log.warning("started_again", part=name, restarts=len(seat.deaths), why=seat.deaths[-1])
        self._fill(name)

    def _is_over(self) -> bool:
        """Whether rollout and learner have ended; the learner has to when the last version is played."""
        if not self._seats["rollout"].ended:
            return False
        self._played_at = self._played_at or time.monotonic()
        if time.monotonic() - self._played_at > LEARNER_END_S and not self._seats["learner"].ended:
            raise GaveUp(f"the learner has not ended {LEARNER_END_S:g} s after the rollout side")
        return self._seats["learner"].ended

    def _write(self) -> None:
        """Keep ``status/actors.json`` up to date."""
        rows = self.rows()
        if rows != self._written:
            write_text(self._folder.path / "status" / "actors.json", json.dumps(rows, indent=1) + "\n")
            self._written = rows


class _Seat:
    """One part: who does it now, and why those before ended."""

    def __init__(self) -> None:
        self.worker: Worker | None = None
        self.status: Status | None = None
        self.started = 0.0
        self.deaths: list[str] = []

    @property
    def ended(self) -> bool:
        return self.status is not None and self.status.state == "ended"

    def row(self) -> dict[str, Any]:
        return asdict(self.status) if self.status else {"state": "missing", "pid": None, "said": ""}

    async def end(self) -> None:
        """End the worker; that its part had ended stays known."""
        if self.worker is not None:
            worker, self.worker = self.worker, None
            self.status = self.status if self.ended else None
            try:
                async with asyncio.timeout(END_S):
                    await worker.stop()
            except TimeoutError:  # another beside it would do the same work
                raise GaveUp(f"a worker has not ended after {END_S:g} s") from None
