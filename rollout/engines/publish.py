"""Bringing one server to a version of the weights: fetch, pause, load, name, resume, probe.

Generation goes on while the server fetches and verifies. It is frozen for the load alone, so the name that vLLM
gives to each token's weights is exact. The probe needs generation, so it comes after resuming: until it has
passed, nothing new is sent there, and no token of the new version that comes from there counts.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path

from hintloop.replay.weights import MANIFEST, Manifest, version_name
from hintloop.rollout.engines.vllm import Patience, ServerError, VllmServer
from hintloop.rollout.weights import Fetched, WeightsRefused, check_probe

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


async def bring_up(
    server: VllmServer,
    release: Release,
    *,
    swap: Swap,
    tolerance: float,
    patience: Patience,
    reload: bool = False,
) -> None:
    """Let ``server`` sample from a version, and check that it does.

    A server that has it by name is only checked, unless ``reload``. Raises ``FetchFailed``, ``ServerError`` and
    ``WeightsRefused``.
    """
    if not reload and await server.weights_name() == release.name:
        if await server.is_paused():  # whoever gave it these weights ended before he could let it go on
            await server.resume()
        await _check(server, release, tolerance)
        return
    await _fetch(server, release.version, release.uri, patience)
    async with swap():
        await _load(server, release, patience)
        await _check(server, release, tolerance)


async def _fetch(server: VllmServer, version: int, uri: str, patience: Patience) -> None:
    """Let all workers fetch; the server samples from what it has meanwhile."""
    deadline, pause = time.monotonic() + patience.fetch, FIRST_LOOK_S
    statuses = await server.call("hintloop_fetch", uri=uri, version=version)
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
    await server.abort_all()
    await server.call("hintloop_quit")
    raise ServerError(
        f"{server.url}: loading version {version} broke the model: {failed[0]}; the server ends"
    )


async def _check(server: VllmServer, release: Release, tolerance: float) -> None:
    try:
        await check_probe(release.fetched, server.score, tolerance)
    except WeightsRefused as error:
        server.standing.refuse(release.name)
        with contextlib.suppress(ServerError):  # what runs there goes on elsewhere; a dead server has nothing
            await server.abort_all()
        raise WeightsRefused(f"{server.url}: {error}") from error
    server.standing.admit(release.version, release.name)


async def confirm(server: VllmServer) -> None:
    """See that the server still has the version that it was given. Raises ``ServerError``."""
    asked, epoch = time.monotonic(), server.standing.epoch
    found = await server.weights_name()
    if server.standing.epoch != epoch:
        return
    if found != server.standing.name:
        raise ServerError(f"{server.url}: its weights are called {found} now; was it started again?")
    server.standing.confirmed_at = asked
