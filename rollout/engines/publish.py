"""Bringing one server to a version of the weights: what all ways have in common, and ``Fetch``, the usual one.

There: fetch, pause, load, name, resume, probe. Generation goes on while the server fetches and verifies. It is frozen
for the load alone, so the name that vLLM gives to each token's weights is exact. The probe needs generation, so it
comes after resuming: until it has passed, nothing new is sent there, and no token of the new version that comes from
there counts.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from hintloop.replay.weights import MANIFEST, Manifest, version_name
from hintloop.rollout.engines.vllm import Patience, ServerError, VllmServer
from hintloop.rollout.weights import Fetched, Score, WeightsRefused, check_probe

FIRST_LOOK_S, LAST_LOOK_S = 0.01, 1.0
"""Pauses between two looks at a fetch; they grow."""


class FetchFailed(ServerError):
    """The server could not get the version; what it has is as good as before."""


@dataclass(frozen=True, slots=True)
class Release:
    """A version that servers are brought to."""

    fetched: Fetched
    uri: str
    """Where the servers fetch it from."""
    name: str
    """What it is called there: the version and a digest of its files, so that no two runs share a name."""

    @classmethod
    def of(cls, folder: Path, uri: str) -> Release:
        """The version whose manifest lies in ``folder``. Raises ``OSError`` and ``ValueError``."""
        manifest = Manifest.from_json((folder / MANIFEST).read_bytes())
        digests = "".join(f"{name} {entry.sha256}\n" for name, entry in sorted(manifest.files.items()))
        digest = hashlib.sha256(digests.encode()).hexdigest()[:12]
        fetched = Fetched(manifest.version, folder, False, manifest.metadata)
        return cls(fetched, uri, f"{version_name(manifest.version)}-{digest}")

    @property
    def version(self) -> int:
        return self.fetched.version


Swap = Callable[[], AbstractAsyncContextManager[None]]
"""Entered for as long as a server does not sample."""


class Way(Protocol):
    """How versions get to the servers of a pool."""

    by_name: bool
    """Versions are adapters that requests name."""
    needs_files: bool
    """This process must have a version's files; otherwise its manifest is enough."""

    async def bring_up(
        self,
        server: VllmServer,
        release: Release,
        *,
        swap: Swap,
        tolerance: float,
        patience: Patience,
        reload: bool = False,
    ) -> None:
        """Give ``server`` a version, and check that it samples from that; the caller then admits it.

        A server that has it by name is only checked, unless ``reload``. Raises ``FetchFailed``, ``ServerError`` and
        ``WeightsRefused``.
        """
        ...

    async def confirm(self, server: VllmServer) -> None:
        """See that the server still has the version that it was given. Raises ``ServerError``."""
        ...

    async def leave(self, server: VllmServer) -> None:
        """Let go what was held for a server that leaves the pool."""
        ...


class Fetch:
    """Each server fetches whole versions from the weights."""

    by_name = False
    needs_files = False

    async def bring_up(
        self,
        server: VllmServer,
        release: Release,
        *,
        swap: Swap,
        tolerance: float,
        patience: Patience,
        reload: bool = False,
    ) -> None:
        """See ``Way``."""
        if not reload and await goes_on_with(server, release):
            await check(server, release, tolerance)
            return
        await fetch(server, release, patience, confirm=self.confirm)
        async with swap():
            await _load(server, release, patience)
            await check(server, release, tolerance)

    async def confirm(self, server: VllmServer) -> None:
        """See ``Way``."""
        await confirm_name(server)

    async def leave(self, server: VllmServer) -> None:
        """See ``Way``."""


async def goes_on_with(server: VllmServer, release: Release) -> bool:
    """Whether a server has the weights of a release by name; it then samples."""
    if await server.weights_name() != release.name:
        return False
    if await server.is_paused():  # whoever gave it these weights ended before he could let it go on
        await server.resume()
    return True


async def fetch(
    server: VllmServer,
    release: Release,
    patience: Patience,
    *,
    confirm: Callable[[VllmServer], Awaitable[None]],
    under: str = "",
) -> list[dict[str, Any]]:
    """Let all workers fetch, the files ``under`` a name only if it is given; what they say in the end.

    The server samples from what it has meanwhile, and is looked at by ``confirm``. Raises ``FetchFailed``.
    """
    deadline, pause, version = time.monotonic() + patience.fetch, FIRST_LOOK_S, release.version
    statuses = await server.call("hintloop_fetch", uri=release.uri, version=version, under=under)
    while not all(status["state"] == "ready" and status["version"] == version for status in statuses):
        for status in statuses:
            if status["version"] != version or status["state"] not in ("fetching", "ready"):
                why = status["error"] or "it was forgotten"
                raise FetchFailed(f"{server.url}: fetching version {version}: {why}")
        if time.monotonic() > deadline:
            raise FetchFailed(f"{server.url}: version {version} was not fetched in {patience.fetch:g} s")
        await asyncio.sleep(pause)
        pause = min(LAST_LOOK_S, 1.5 * pause)
        if server.standing.version is not None:
            await confirm(server)
        statuses = await server.call("hintloop_status")
    return statuses


async def _load(server: VllmServer, release: Release, patience: Patience) -> None:
    version = release.version
    server.standing.begin()
    await server.pause()
    answers = await server.call("hintloop_load", seconds=patience.load, version=version)
    failed = [answer["error"] for answer in answers if not answer["ok"]]
    if not failed:
        await server.name_weights(release.name)
        await server.resume()
        return
    if all(answer["intact"] and not answer["ok"] for answer in answers):
        await server.resume()
        raise ServerError(f"{server.url}: version {version} was not loaded: {failed[0]}")
    await end(server)
    raise ServerError(
        f"{server.url}: loading version {version} broke the model: {failed[0]}; the server ends"
    )


async def end(server: VllmServer) -> None:
    """End a server whose model is lost."""
    with contextlib.suppress(ServerError):  # what runs there breaks off then, instead of being answered
        await server.abort_all()
    await server.call("hintloop_quit")


async def check(server: VllmServer, release: Release, tolerance: float, score: Score | None = None) -> None:
    """See that a server computes with a release what the learner does. Raises ``WeightsRefused``."""
    try:
        await check_probe(release.fetched, score or server.score, tolerance)
    except WeightsRefused as error:
        server.standing.refuse(release.name)
        with contextlib.suppress(ServerError):  # what runs there goes on elsewhere; a dead server has nothing
            await server.abort_all()
        raise WeightsRefused(f"{server.url}: {error}") from error
    server.standing.verify(release.version, release.name)


async def confirm_name(server: VllmServer) -> None:
    """See that the weights of a server have the name that they were given. Raises ``ServerError``."""
    asked, epoch = time.monotonic(), server.standing.epoch
    found = await server.weights_name()
    if server.standing.epoch != epoch:
        return
    if found != server.standing.name:
        raise ServerError(f"{server.url}: its weights are called {found} now; was it started again?")
    server.standing.confirmed_at = asked
