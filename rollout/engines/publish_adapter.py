"""Bringing one server to a version as an adapter: it fetches the adapter alone, and loads it beside the others.

Nothing is paused: a request keeps the adapter that it began with, so all of its tokens are of one version. Each
version has a name and a path of its own; vLLM's loading in place reads the disk at every step, and reuses what it
cached for the old weights. A server that was started again has no adapters, and answers no request that names one.
"""

from __future__ import annotations

import time
from functools import partial

from hintloop.rollout.engines.publish import FetchFailed, Release, Swap, check, fetch
from hintloop.rollout.engines.vllm import Patience, ServerError, VllmServer
from hintloop.rollout.vllm_server import ADAPTER_SLOTS

FOLDER = "adapter/"
"""Where a version holds its adapter, in PEFT's format."""


class Adapter:
    """Each server fetches the adapters of versions; requests name the newest."""

    by_name = True
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
        """See ``Way``; nothing is paused, so ``swap`` is not entered."""
        if not server.config.get("lora_config"):
            raise ServerError(f"{server.url} takes no adapters: start it with --lora-rank")
        held = await server.adapters()
        if reload and release.name in held:
            await server.unload_adapter(release.name)
            held.remove(release.name)
        if release.name not in held:
            await self._load(server, release, patience)
        await check(server, release, tolerance, partial(server.score_adapter, name=release.name))

    async def confirm(self, server: VllmServer) -> None:
        """See ``Way``; adapters that no request uses any more are unloaded."""
        standing = server.standing
        asked, epoch = time.monotonic(), standing.epoch
        held = await server.adapters()
        if standing.epoch != epoch:
            return
        if standing.name not in held:
            raise ServerError(f"{server.url}: it has no adapter {standing.name}; was it started again?")
        standing.confirmed_at = asked
        for name in held:
            if name != standing.name and name not in server.in_use:
                await server.unload_adapter(name)

    async def leave(self, server: VllmServer) -> None:
        """See ``Way``."""

    async def _load(self, server: VllmServer, release: Release, patience: Patience) -> None:
        used = {*server.in_use, *([server.standing.name] if server.standing.version is not None else [])}
        if len(used) >= ADAPTER_SLOTS:  # one more would push out one that a request still needs
            raise FetchFailed(f"{server.url} still answers with the adapters {', '.join(sorted(used))}")
        statuses = await fetch(server, release, patience, confirm=self.confirm, under=FOLDER)
        folders = {status["folder"] for status in statuses}
        if len(folders) > 1:
            raise ServerError(f"{server.url}: its workers fetch to different folders: {sorted(folders)}")
        await server.load_adapter(release.name, f"{folders.pop()}/{FOLDER.rstrip('/')}")
