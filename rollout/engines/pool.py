"""Many inference servers as one engine.

Each server has a loop of its own that looks at it, brings it to the newest weights and, when it failed, back
into the pool; only a server whose weights are checked is sent anything. The turns of one episode go to the
server that has its prefix cached, unless that one has much more to do than another.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import structlog

from hintloop.agent.engine import EngineError, Sample, Sampling
from hintloop.rollout.engines.answer import Piece
from hintloop.rollout.engines.publish import Fetch, FetchFailed, Release, Way
from hintloop.rollout.engines.turn import TurnCounts, sample_turn
from hintloop.rollout.engines.vllm import Patience, ServerError, VllmServer
from hintloop.rollout.engines.wire import LeanTransport, check_url
from hintloop.rollout.weights import PROBE_TOLERANCE, WeightsRefused

AFFINITY_SLACK = 8
"""An episode changes servers when its own has so many requests more than the one with the fewest."""
LESS_TO_DO = 0.5
"""A request that a busy server is late with goes to one that has less than this share of its requests."""
ERRORS_IN_A_ROW = 3
"""Refused requests after which a server is looked at before it gets more."""
REFUSALS = 3
"""Failed probes of one server after which a version is given up, if nobody else has it."""
PAUSED_SHARE = 0.25
"""Share of the servers that may change their weights at the same time; one always may."""
FIRST_PAUSE_S, LAST_PAUSE_S = 0.05, 5.0
"""Pauses before a server that failed is looked at again; they double."""
MAX_SESSIONS = 65536
_log = structlog.get_logger(__name__)


class _Overtaken(Exception):
    """A newer version is there, or the server leaves: no use in changing its weights now."""


@dataclass(eq=False, slots=True)
class _Member:
    server: VllmServer
    task: asyncio.Task[None] | None = None
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    in_flight: int = 0
    changing: bool = False
    """It is paused for new weights, or these are not checked yet."""
    changes_since: float = 0.0
    """Monotonic seconds."""
    waiting: bool = False
    """It could change, and waits for its turn."""
    leaving: bool = False
    failures: int = 0
    """Since it last answered a request."""
    errors: int = 0
    """Refused requests in a row."""
    refusals: int = 0
    """Failed probes in a row."""
    reason: str = "not looked at yet"

    @property
    def version(self) -> int | None:
        return self.server.standing.version

    @property
    def ready(self) -> bool:
        return self.version is not None and not self.leaving

    @property
    def state(self) -> str:
        if self.ready:
            return "slow" if self.server.late else "ready"
        return "changing" if self.changing else "out"


class Pool:
    """An ``Engine`` on servers that come and go. For one event loop; nothing runs before its first use."""

    def __init__(
        self,
        urls: Iterable[str],
        *,
        weights_uri: str,
        stop_ids: Sequence[int],
        patience: Patience | None = None,
        probe_tolerance: float = PROBE_TOLERANCE,
        roster: Path | None = None,
        way: Way | None = None,
        room: int = 0,
    ) -> None:
        """The servers get versions of ``weights_uri`` by ``way``, or fetch them; ``stop_ids`` end a turn.

        A server that takes fewer than ``room`` tokens, prompt and answer together, is not taken.
        While the file ``roster`` exists, the URLs in it, one a line, are the servers instead of ``urls``.
        Raises ``ValueError`` for what is no URL.
        """
        self.counts = TurnCounts()
        self._urls = tuple(urls)
        for url in self._urls:
            check_url(url)
        self._weights_uri = weights_uri
        self._stop_ids = stop_ids
        self._patience = patience or Patience()
        self._tolerance = probe_tolerance
        self._roster = roster
        self._way = way or Fetch()
        self._room = room
        transport = LeanTransport(connect_s=self._patience.connect)
        self._client = httpx.AsyncClient(transport=transport, timeout=None, trust_env=False)
        self._members: dict[str, _Member] = {}
        self._leaving: list[_Member] = []
        """Removed, and still kept: what is done with their servers is brought to its end."""
        self._homes: OrderedDict[str, _Member] = OrderedDict()
        self._release: Release | None = None
        self._following: asyncio.Task[None] | None = None
        self._moved = asyncio.Event()
        self._closed = False

    # The engine

    @property
    def version(self) -> int:
        """The version that was loaded last; -1 before the first."""
        return -1 if self._release is None else self._release.version

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, *, session: str) -> Sample:
        """Sample one continuation; see ``Engine``. Survives servers that end in the middle of it."""
        self._start()
        ask = partial(self._ask, session)
        return await sample_turn(ask, prompt_ids, sampling, seconds=self._patience.turn, counts=self.counts)

    async def end_session(self, session: str) -> None:
        """Forget where ``session`` was sampled."""
        self._homes.pop(session, None)

    async def load_weights(self, folder: Path, version: int) -> None:
        """Bring the servers to a version; of ``folder`` only the manifest is read, unless the way needs more.

        Returns when every server in the pool has it, and one at least. Raises ``WeightsRefused`` when the
        servers do not reproduce its probe, and ``EngineError`` when none has it in time.
        """
        release = Release.of(folder, self._weights_uri)
        if release.version != version:
            raise ValueError(f"{folder} holds version {release.version}, not {version}")
        self._start()
        self._release = release
        for member in self._members.values():
            member.refusals = 0
            member.wake.set()
        await self._all_at(version)

    def stats(self) -> dict[str, float]:
        """Totals since the start, and how many servers there are."""
        ready = sum(member.ready for member in self._members.values())
        return {**asdict(self.counts), "servers": len(self._members), "servers_ready": ready}

    def servers(self) -> list[dict[str, Any]]:
        """Each server with its version, requests in flight and what keeps it from sampling, as JSON data."""
        return [
            {
                "url": url,
                "version": member.version,
                "in_flight": member.in_flight,
                "state": member.state,
                "reason": f"late with {member.server.late} requests"
                if member.state == "slow"
                else member.reason,
            }
            for url, member in self._members.items()
        ]

    async def close(self) -> None:
        """Refuse everything from now on; the servers themselves go on."""
        self._closed = True
        self._move()
        tasks = [member.task for member in (*self._members.values(), *self._leaving) if member.task]
        tasks += [self._following] if self._following else []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._client.aclose()

    # Who belongs to it

    def add(self, url: str) -> None:
        """Let a server join, once it has the newest weights. Raises ``ValueError`` for what is no URL."""
        check_url(url)
        self._start()
        self._add(url.rstrip("/"))

    def _add(self, url: str) -> None:
        if url in self._members:
            return
        server = VllmServer(
            url,
            self._client,
            stop_ids=self._stop_ids,
            patience=self._patience,
            by_name=self._way.by_name,
            room=self._room,
        )
        member = self._members[url] = _Member(server)
        before = [other.task for other in self._leaving if other.server.url == url and other.task]
        member.task = asyncio.create_task(self._keep(member, before))

    def remove(self, url: str) -> None:
        """Send nothing more to a server; what it is doing is finished."""
        member = self._members.pop(url.rstrip("/"), None)
        if member is not None:
            member.leaving = True
            member.wake.set()
            self._leaving.append(member)
            self._move()

    def _check_open(self) -> None:
        if self._closed:
            raise EngineError("the engine pool is closed")

    def _start(self) -> None:
        self._check_open()
        if self._following is None:
            self._set_urls(self._urls)
            self._following = asyncio.create_task(self._follow_roster())

    def _set_urls(self, urls: Sequence[str]) -> None:
        wanted = [url.rstrip("/") for url in urls]
        for url in [url for url in self._members if url not in wanted]:
            self.remove(url)
        for url in wanted:
            self._add(url)

    async def _follow_roster(self) -> None:
        told: set[str] = set()
        while self._roster is not None:
            urls, problems = self._read_roster(self._roster)
            self._set_urls(urls)
            for problem in sorted(problems - told):
                _log.warning("engine_roster_not_read", path=str(self._roster), error=problem)
            told = problems
            await asyncio.sleep(self._patience.poll)

    def _read_roster(self, roster: Path) -> tuple[list[str], set[str]]:
        """The servers that there are to be, and what is wrong with the file."""
        try:
            lines = roster.read_text().splitlines()
        except FileNotFoundError:
            return list(self._urls), set()
        except (OSError, ValueError) as error:
            return list(self._members), {repr(error)}
        urls, problems = [], set()
        for line in filter(None, map(str.strip, lines)):
            try:
                check_url(line)
                urls.append(line)
            except ValueError as error:
                problems.add(str(error))
        return urls, problems

    # Sampling

    async def _ask(self, session: str, prompt_ids: Sequence[int], sampling: Sampling) -> Piece:
        member = counted = await self._pick(session)
        epoch = member.server.standing.epoch

        def leave() -> bool:
            """Whether a request without a token is better made elsewhere; it is counted there from then on."""
            nonlocal counted
            least = self._least()
            if least is None or LESS_TO_DO * counted.in_flight <= least.in_flight:
                return False
            counted.in_flight -= 1
            least.in_flight += 1
            counted = self._homes[session] = least
            return True

        member.in_flight += 1
        try:
            piece = await member.server.sample(prompt_ids, sampling, leave=leave)
        finally:
            counted.in_flight -= 1
        if piece.finish_reason:
            member.failures = member.errors = 0
        elif not piece.slow:
            member.errors += 1
            if (piece.gone or member.errors >= ERRORS_IN_A_ROW) and epoch == member.server.standing.epoch:
                self._drop(member, piece.problem)
        return piece

    def _least(self) -> _Member | None:
        """The server with the fewest requests, of those that may get one."""
        ready = [member for member in self._members.values() if member.ready]
        return min(ready, key=lambda member: member.in_flight, default=None)

    async def _pick(self, session: str) -> _Member:
        """The server for a request; waits for one."""
        while (least := self._least()) is None:
            self._check_open()
            await self._change()
        home = self._homes.get(session)
        if home is None or not home.ready or home.in_flight > least.in_flight + AFFINITY_SLACK:
            self._homes[session] = home = least
        self._homes.move_to_end(session)
        if len(self._homes) > MAX_SESSIONS:
            self._homes.popitem(last=False)
        return home

    # Keeping the servers

    async def _keep(self, member: _Member, before: Sequence[asyncio.Task[None]]) -> None:
        """Tend a server, once the tasks ``before``, which kept it when it belonged to the pool before, have ended."""
        try:
            if before:
                await asyncio.wait(before)
            await self._tend(member)
        finally:
            member.server.standing.lose()  # nobody sees any more what it samples from; waits for a check end
            try:
                await self._way.leave(member.server)
            finally:
                if member in self._leaving:
                    self._leaving.remove(member)

    async def _tend(self, member: _Member) -> None:
        """Look at one server again and again, for as long as it belongs to the pool."""
        while not member.leaving:
            if member.failures and not member.ready:
                pause = FIRST_PAUSE_S * 2 ** min(member.failures - 1, 16)
                await asyncio.sleep(min(LAST_PAUSE_S, pause))
            try:
                await self._look(member)
            except _Overtaken:
                pass
            except FetchFailed as error:
                member.failures += 1
                member.reason = str(error)
            except (ServerError, WeightsRefused) as error:
                member.refusals += isinstance(error, WeightsRefused)
                self._drop(member, str(error))
            except Exception as error:  # noqa: BLE001 - one odd server must not stop its own loop; recorded here
                self._drop(member, f"{member.server.url}: {error!r}")
            self._move()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._patience.poll if member.ready else 0):
                    await member.wake.wait()
            member.wake.clear()

    async def _look(self, member: _Member) -> None:
        """See that a server is well and has the newest weights, or give it these."""
        server, release = member.server, self._release
        if release is None:
            await member.wake.wait()
            return
        if member.version == release.version:
            await self._way.confirm(server)
            return
        if not member.ready:
            await server.connect()
        await self._way.bring_up(
            server,
            release,
            swap=partial(self._swap, member, release),
            tolerance=self._tolerance,
            patience=self._patience,
            reload=member.refusals > 0,
        )
        member.refusals = 0
        if release is not self._release:  # nobody waits for a server that was out: it must not serve this
            raise _Overtaken
        server.standing.admit(release.version, release.name)
        member.reason = ""
        _log.info("engine_ready", url=server.url, version=release.version)

    @contextlib.asynccontextmanager
    async def _swap(self, member: _Member, release: Release) -> AsyncIterator[None]:
        """Entered when few enough others are changing their weights; one that does not sample need not wait."""
        member.waiting = True
        try:
            while member.ready and not self._may_change():
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._patience.poll):
                        await self._change()
        finally:
            member.waiting = False
        if member.leaving or release is not self._release:
            raise _Overtaken
        member.changing = True
        member.changes_since = time.monotonic()
        try:
            yield
        finally:
            member.changing = False
            self._move()

    def _may_change(self) -> bool:
        """Whether one more may, of those that sample or will soon; one that takes too long is not waited for."""
        begun, members = time.monotonic() - self._patience.lag, self._members.values()
        changing = sum(member.changing and member.changes_since > begun for member in members)
        ready = sum(member.ready for member in members)
        return changing < max(1, int(PAUSED_SHARE * (ready + changing)))

    def _drop(self, member: _Member, reason: str) -> None:
        member.failures += 1
        member.errors = 0
        if member.ready or reason != member.reason:
            event = "engine_left" if member.ready else "engine_not_taken"
            _log.warning(event, url=member.server.url, reason=reason)
        member.reason = reason
        member.server.standing.lose()
        member.wake.set()
        self._move()

    async def _all_at(self, version: int) -> None:
        started, first_at = time.monotonic(), None
        while True:
            members, now = list(self._members.values()), time.monotonic()
            there = [member for member in members if member.version == version]
            behind = [member for member in members if member.ready and member.version != version]
            if there and not behind:
                return
            if there:
                first_at = first_at or now
            late = [member for member in behind if not member.waiting]
            if first_at and now - first_at > self._patience.lag and late:
                for member in late:
                    self._drop(member, f"{member.server.url}: version {version} came later than elsewhere")
                continue
            reasons = "; ".join(member.reason for member in members) or "there is no server"
            if not there and not behind and any(member.refusals >= REFUSALS for member in members):
                raise WeightsRefused(reasons)
            if not there and now - started > self._patience.join:
                raise EngineError(
                    f"no server has version {version} after {self._patience.join:g} s: {reasons}"
                )
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._patience.poll):
                    await self._change()

    def _move(self) -> None:
        self._moved.set()

    async def _change(self) -> None:
        self._moved.clear()
        await self._moved.wait()
