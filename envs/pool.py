"""Sessions with any number of environment servers, as one pool.

An episode goes to the server with the fewest of them. A server that fails is left alone for a while, and then asked
by one caller before the others come back to it; a full one is asked again when a session becomes free.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from hintloop.envs.client import (
    MESSAGE_TIMEOUT_S,
    WAIT_S,
    AtCapacity,
    CodingEnvClient,
    EnvironmentLost,
    open_session,
)

FULL_S = 3600.0
"""How long servers that only say that they are full are waited for, from the last session that one opened."""
_RETRY_S = (0.05, 1.0)
"""First and longest pause before a server is asked again; they double."""
_AVOIDED_S = 10.0
"""The longest pause where there are other servers."""
_CLOSE_S = 10.0
_BAD_SESSIONS = 3
"""Sessions in a row that a server fails before the others are preferred to it."""


@dataclass(eq=False, slots=True)
class _Server:
    url: str
    idle: list[CodingEnvClient] = field(default_factory=list)
    in_use: int = 0
    refusals: int = 0
    """Sessions in a row that it did not open."""
    full: bool = False
    """For want of room."""
    bad_sessions: int = 0
    """Sessions in a row that it opened and failed."""
    ask_at: float = 0.0
    """When one caller may find out whether it is back, by the monotonic clock."""
    probing: bool = False
    """One does."""
    reason: str = ""

    @property
    def state(self) -> str:
        """``ready``, ``full``, ``down`` or ``failing``."""
        if self.refusals:
            return "full" if self.full else "down"
        return "failing" if self.bad_sessions >= _BAD_SESSIONS else "ready"

    @property
    def open(self) -> bool:
        """Whether it may be asked for a session now."""
        if self.state == "ready" or (self.full and self.idle):
            return True
        return time.monotonic() >= self.ask_at and not self.probing

    def pause(self, problems: int, longest: float, reason: str) -> None:
        """Leave it alone for a while."""
        self.ask_at = time.monotonic() + min(_RETRY_S[0] * 2 ** min(problems - 1, 16), longest)
        self.reason = reason


class EnvPool:
    """At most ``size`` sessions, each used for many episodes.

    More callers than sessions wait their turn, and so do sessions that no server has room for yet, or that meet
    servers which are about to start again.
    """

    def __init__(
        self,
        urls: str | Sequence[str],
        *,
        size: int,
        wait_s: float = WAIT_S,
        full_s: float = FULL_S,
        message_timeout_s: float = MESSAGE_TIMEOUT_S,
    ):
        """``urls``: of one server or several. ``ValueError`` for none."""
        named = [urls] if isinstance(urls, str) else list(dict.fromkeys(urls))
        if not named:
            raise ValueError("an environment pool needs the URL of a server")
        self._servers = [_Server(url) for url in named]
        self._slots = asyncio.Semaphore(size)
        self._moved = asyncio.Event()
        self._moved_at = self._heard_at = 0.0
        """When a session opened or came back last, and when any server last answered, by the loop's clock."""
        self._wait_s = wait_s
        self._full_s = full_s
        self._message_timeout_s = message_timeout_s

    @contextlib.asynccontextmanager
    async def session(self) -> AsyncIterator[CodingEnvClient]:
        """A session to run episodes in, for this caller alone.

        ``EnvironmentLost`` when no server has answered for ``wait_s`` seconds, or none has had a free session for
        ``full_s``. A session whose episode was left unfinished, or that the machinery failed, is not used again;
        the server then removes its sandbox.
        """
        server, client = await self._acquire()
        try:
            yield client
        finally:
            self._give_back(server, client)
            self._slots.release()

    def servers(self) -> list[dict[str, Any]]:
        """Each server with its sessions in use and what keeps it from giving more, as JSON data."""
        return [
            {"url": each.url, "in_use": each.in_use, "state": each.state, "reason": each.reason}
            for each in self._servers
        ]

    async def close(self) -> None:
        """Close the sessions that nobody uses."""
        clients = [client for server in self._servers for client in server.idle]
        for server in self._servers:
            server.idle.clear()
        if clients:
            closing = [asyncio.ensure_future(client.close()) for client in clients]
            _, late = await asyncio.wait(closing, timeout=_CLOSE_S)
            for task in late:
                task.cancel()
            await asyncio.gather(*closing, return_exceptions=True)

    async def _acquire(self) -> tuple[_Server, CodingEnvClient]:
        await self._slots.acquire()  # those who hold them have deadlines
        started = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(self._wait_s) as patience:
                return await self._find(patience, started)
        except TimeoutError:
            self._slots.release()
            waited = asyncio.get_running_loop().time() - started
            said = [f"{each.url}: {each.reason}" for each in self._servers if each.reason]
            problem = "; ".join(said) or "no answer"
            raise EnvironmentLost(f"no session within {waited:.1f} s: {problem}") from None
        except BaseException:
            self._slots.release()
            raise

    def _deadline(self, started: float) -> float:
        """When a caller who came at ``started`` gives up."""
        return min(max(started, self._heard_at) + self._wait_s, max(started, self._moved_at) + self._full_s)

    async def _find(self, patience: asyncio.Timeout, started: float) -> tuple[_Server, CodingEnvClient]:
        """A session with the server that has the fewest in use, of those that may be asked."""
        while True:
            patience.reschedule(self._deadline(started))
            ready = [server for server in self._servers if server.open]
            if not ready:
                await self._pause()
                continue
            server = min(ready, key=lambda each: (each.in_use, not each.idle))
            server.in_use += 1
            try:
                return server, await self._take(server)
            except EnvironmentLost as error:
                server.in_use -= 1
                server.full = isinstance(error, AtCapacity)
                if server.full:
                    self._heard_at = asyncio.get_running_loop().time()
                server.refusals += 1
                longest = _RETRY_S[1] if server.full else self._longest_pause
                server.pause(server.refusals, longest, str(error))
            except BaseException:
                server.in_use -= 1
                raise

    async def _take(self, server: _Server) -> CodingEnvClient:
        """A session with a server. Raises ``EnvironmentLost``."""
        while server.idle:
            client = server.idle.pop()
            if client.alive:
                return client
        was, server.probing = server.state, True
        try:
            client = await open_session(server.url, message_timeout_s=self._message_timeout_s)
            if was != "failing":
                server.probing = False
        except BaseException:
            server.probing = False
            raise
        server.refusals, server.full = 0, False
        self._move()
        return client

    def _give_back(self, server: _Server, client: CodingEnvClient) -> None:
        server.in_use -= 1
        server.probing = False
        if client.reusable:
            server.idle.append(client)
            server.bad_sessions = 0
        else:
            client.abandon()
            if server.full:
                server.ask_at = 0.0  # there is room for another now
            if client.failed and len(self._servers) > 1:
                server.bad_sessions += 1
                server.pause(server.bad_sessions, _AVOIDED_S, "a session that it had opened failed")
        if server.state == "ready":
            server.reason = ""
        self._move()

    def _move(self) -> None:
        self._moved_at = self._heard_at = asyncio.get_running_loop().time()
        self._moved.set()

    async def _pause(self) -> None:
        """Wait until a session comes back, or a server may be asked again."""
        moments = [server.ask_at for server in self._servers if not server.probing]
        seconds = min(moments, default=time.monotonic() + _RETRY_S[1]) - time.monotonic()
        self._moved.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(seconds, _RETRY_S[0])):
                await self._moved.wait()

    @property
    def _longest_pause(self) -> float:
        return _AVOIDED_S if len(self._servers) > 1 else _RETRY_S[1]
