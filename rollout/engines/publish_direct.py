"""Sending a version to one server through vLLM's own weight transfer, from this process's copy of its files.

The tensors go from a process in vLLM's environment (``hintloop.rollout.vllm_sender``), one for each server: who waits
for a peer that died can only be ended. Everything that can be wrong with a version is found before the transfer
begins. After that vLLM cannot go back, so a server whose transfer fails must end; while one goes on, it is set to end
by itself, for it answers no call if its sender or this process dies then.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from hintloop.rollout.engines.publish import (
    Release,
    Swap,
    check,
    confirm_name,
    end,
    goes_on_with,
)
from hintloop.rollout.engines.vllm import Patience, ServerError, VllmServer
from hintloop.rollout.vllm_extension import read_config

PYTHON = "HINTLOOP_VLLM_PYTHON"
"""Environment variable: the Python of an environment with vLLM, for the sender."""
UNFINISHED = "unfinished"
"""What weights are called while they change."""
MAX_LINE_BYTES = 64 << 20
START_S, STOP_S = 60.0, 10.0
"""Time for a sender to start, and to end."""


class Direct:
    """This process sends whole versions."""

    by_name = False
    needs_files = True

    def __init__(self) -> None:
        self._senders: dict[VllmServer, Sender] = {}

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
        if await server.weights_name() == UNFINISHED:
            await end(server)
            raise ServerError(f"{server.url}: who sent it weights did not finish; the server ends")
        if not reload and await goes_on_with(server, release):
            await _end_in(server, 0.0)
            await check(server, release, tolerance)
            return
        await _check_model(server, release.fetched.folder)
        sender = await self._sender(server, patience)
        told = await sender.ask("describe", patience.load, folder=str(release.fetched.folder))
        if server.standing.version is not None:
            await self.confirm(server)
        async with swap():
            await self._send(server, release, sender, told["update_info"], patience)
            await check(server, release, tolerance)

    async def confirm(self, server: VllmServer) -> None:
        """See ``Way``."""
        await confirm_name(server)

    async def leave(self, server: VllmServer) -> None:
        """See ``Way``."""
        if (sender := self._senders.pop(server, None)) is not None:
            await sender.close()

    async def _sender(self, server: VllmServer, patience: Patience) -> Sender:
        """The sender of a server, connected with it. A server that may be another process gets a new one."""
        known = self._senders.get(server)
        if known is not None and server.standing.version is not None:
            return known
        await self.leave(server)
        backend = (server.config.get("weight_transfer_config") or {}).get("backend")
        if not backend:
            raise ServerError(f"{server.url} takes no weights: start it with --weight-transfer-config")
        sender = self._senders[server] = await Sender.start(server.url, str(backend))
        try:
            workers = await server.world_size()
            host = urlsplit(server.url).hostname or ""
            offer = await sender.ask("offer", START_S, host=host, workers=workers)
            async with _leash(server, patience):
                await server.transfer("shutdown_weight_transfer_engine")
                body = {"init_info": offer["init_info"]}
                await _both(
                    server.transfer("init_weight_transfer_engine", body), sender.ask("join", patience.load)
                )
        except BaseException:
            await self.leave(server)
            raise
        return sender

    async def _send(
        self,
        server: VllmServer,
        release: Release,
        sender: Sender,
        update_info: dict[str, Any],
        patience: Patience,
    ) -> None:
        server.standing.begin()
        await server.pause()
        await _end_in(server, patience.load + patience.control)
        await server.name_weights(UNFINISHED)
        try:
            await server.transfer("start_weight_update")
            body = {"update_info": update_info}
            await _both(server.transfer("update_weights", body), sender.ask("send", patience.load))
            await server.transfer("finish_weight_update", {"weight_version": release.name})
        except ServerError as error:
            await self.leave(server)
            with contextlib.suppress(ServerError):  # then it ends by itself
                await end(server)
            raise ServerError(
                f"{server.url}: sending version {release.version} broke the model: {error}; the server ends"
            ) from error
        await _end_in(server, 0.0)
        await server.resume()


async def _check_model(server: VllmServer, folder: Path) -> None:
    answers = await server.call("hintloop_suits", config=await asyncio.to_thread(read_config, folder))
    for answer in answers:
        if not answer["ok"]:
            raise ServerError(f"{server.url}: {answer['error']}")


async def _end_in(server: VllmServer, delay: float) -> None:
    await server.call("hintloop_end_in", delay=delay)


@contextlib.asynccontextmanager
async def _leash(server: VllmServer, patience: Patience) -> AsyncIterator[None]:
    """Let a server end by itself if it does not come back from what is done meanwhile."""
    await _end_in(server, patience.load + patience.control)
    try:
        yield
    finally:
        with contextlib.suppress(ServerError):  # it does not come back
            await _end_in(server, 0.0)


async def _both(*steps: Coroutine[Any, Any, Any]) -> None:
    """Both sides of one step; the failure of one ends the wait for the other."""
    tasks = [asyncio.create_task(step) for step in steps]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Sender:
    """The process that sends to one server: one line of JSON for each command, and one for its answer."""

    def __init__(self, url: str, process: asyncio.subprocess.Process) -> None:
        self._url = url
        self._process = process

    @classmethod
    async def start(cls, url: str, backend: str) -> Sender:
        """Start one for the server at ``url``. Raises ``ServerError``."""
        python = os.environ.get(PYTHON) or sys.executable
        words = [python, "-m", "hintloop.rollout.vllm_sender", "--backend", backend]
        pipe = asyncio.subprocess.PIPE
        try:
            process = await asyncio.create_subprocess_exec(
                *words, stdin=pipe, stdout=pipe, limit=MAX_LINE_BYTES
            )
        except OSError as error:
            raise ServerError(f"{url}: its sender cannot be started: {error}") from error
        return cls(url, process)

    async def ask(self, what: str, seconds: float, **details: Any) -> dict[str, Any]:
        """Let it do something; what it says. Raises ``ServerError``; it is of no use then."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        try:
            async with asyncio.timeout(seconds):
                stdin.write(json.dumps({"do": what, **details}).encode() + b"\n")
                await stdin.drain()
                line = await stdout.readline()
            answer: dict[str, Any] = json.loads(line) if line else {"error": "it ended"}
        except TimeoutError:
            raise ServerError(f"{self._url}: its sender did not {what} in {seconds:g} s") from None
        except (OSError, ValueError) as error:
            raise ServerError(f"{self._url}: its sender did not {what}: {error!r}") from error
        if not answer.get("ok"):
            raise ServerError(f"{self._url}: its sender did not {what}: {answer.get('error')}")
        return answer

    async def close(self) -> None:
        """End it, whatever it is doing."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_S):
                await self._process.wait()
