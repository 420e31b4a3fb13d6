"""The simulated server as a process, or as a thread of this one."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import uvicorn

from hintloop.rollout.engines.sim import Dropped, SimEngine
from hintloop.rollout.engines.sim_plan import Plan
from hintloop.rollout.engines.sim_routes import create_app

STOP_S = 10.0


class SimServer(uvicorn.Server):
    """Serves an engine; announces its URL when it is ready, and returns on a signal."""

    def __init__(self, engine: SimEngine, sock: socket.socket, ready_file: Path | None = None) -> None:
        config = uvicorn.Config(
            create_app(engine),
            log_level="warning",
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=1,
        )
        super().__init__(config)
        self.url = "http://{}:{}".format(*sock.getsockname()[:2])
        self._sock = sock
        self._ready_file = ready_file
        logging.getLogger("uvicorn.error").addFilter(_unplanned)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop."""
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and say so."""
        await super().startup([self._sock])
        if self._ready_file is not None:
            part = self._ready_file.with_name(f"{self._ready_file.name}.{os.getpid()}.part")
            part.write_text(self.url + "\n")
            part.replace(self._ready_file)


def listen(host: str, port: int) -> socket.socket:
    """A listening socket whose connections send at once: asyncio sees to that for its own sockets only."""
    sock = socket.create_server((host, port))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def _unplanned(record: logging.LogRecord) -> bool:
    """Whether a log record tells of anything but a connection that was dropped on purpose."""
    error = record.exc_info[1] if record.exc_info else None
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return not isinstance(error, Dropped)


def serve(
    plan: Plan,
    *,
    cache: Path,
    host: str = "127.0.0.1",
    port: int = 0,
    seed: int = 0,
    ready_file: Path | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT. ``port`` 0 takes a free one; ``ready_file`` then gets the URL."""
    sock = listen(host, port)
    port = sock.getsockname()[1]
    engine = SimEngine(plan, cache=cache, seed=seed, quit=lambda: os._exit(1), restart=_restarter(port))
    if ready_file is not None:
        ready_file.unlink(missing_ok=True)
    try:
        SimServer(engine, sock, ready_file).run(sockets=[sock])
    finally:
        sock.close()
        if ready_file is not None:
            ready_file.unlink(missing_ok=True)


@contextlib.contextmanager
def in_thread(engine: SimEngine) -> Iterator[str]:
    """Serve in a thread of this process, for tests and measurements; gives the URL."""
    with listen("127.0.0.1", 0) as sock:
        server = SimServer(engine, sock)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, daemon=True)
        thread.start()
        try:
            yield server.url
        finally:
            server.should_exit = True
            thread.join(STOP_S)
            engine.close()


_WAIT_AND_RUN = "import os, sys, time; time.sleep(float(sys.argv[1])); os.execv(sys.argv[2], sys.argv[2:])"


def _restarter(port: int) -> Callable[[float], None]:
    """Ends every connection and runs the same command again on the same port, without planned faults."""

    def restart(seconds: float) -> None:
        again = [sys.executable, *sys.orig_argv[1:], "--port", str(port), "--no-faults"]
        os.execv(sys.executable, [sys.executable, "-c", _WAIT_AND_RUN, str(seconds), *again])

    return restart
