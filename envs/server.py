"""The coding environment behind an OpenEnv WebSocket server: the application, and how to serve it."""

from __future__ import annotations

import asyncio
import errno
import functools
import os
import socket
from pathlib import Path
from types import FrameType
from urllib.parse import urlsplit

import structlog
import uvicorn
from fastapi import FastAPI
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocketDisconnect

from hintloop.envs._openenv import ConcurrencyConfig, create_app
from hintloop.envs.mcp_tools import DEFAULT_TASKSET, OpenEnvironment
from hintloop.envs.models import CodingState, ToolCall, ToolResult
from hintloop.envs.sandbox.base import SandboxProvider
from hintloop.envs.sandbox.local import LocalProvider

MAX_SESSIONS = 64
SESSION_TIMEOUT_S = 3600.0
"""An idle session is closed after this long, even with its socket open: more than any pause of an agent."""
MAX_MESSAGE_BYTES = 16 * 1024 * 1024
_SHUTDOWN_S = 5
_LOOPBACK = {"127.0.0.1", "localhost", "::1"}


class _Gate:
    """Refuses browsers whose page is neither from this machine nor from ``host``; lets clients leave quietly.

    Any web page may open a WebSocket to a loopback port; only browsers send ``Origin``, and then always.
    """

    def __init__(self, app: ASGIApp, host: str):
        self._app = app
        self._hosts = {*_LOOPBACK, host}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        origin = next((value for name, value in scope.get("headers", ()) if name == b"origin"), None)
        if origin is not None and urlsplit(origin.decode("latin-1")).hostname not in self._hosts:
            await PlainTextResponse("pages of other hosts are refused", 403)(scope, receive, send)
            return
        try:
            await self._app(scope, receive, send)
        except RuntimeError as error:
            if not _client_left(error):
                raise
            structlog.get_logger().info("a client left in the middle of a step")


def _client_left(error: BaseException | None) -> bool:
    """Whether this came of answering a client that is gone, which OpenEnv tries three times."""
    while error is not None:
        if isinstance(error, WebSocketDisconnect):
            return True
        error = error.__context__
    return False


def create_server_app(
    provider: SandboxProvider,
    *,
    host: str = "127.0.0.1",
    taskset: str = DEFAULT_TASKSET,
    max_sessions: int = MAX_SESSIONS,
    session_timeout_s: float = SESSION_TIMEOUT_S,
) -> FastAPI:
    """The OpenEnv server as an ASGI application; it closes ``provider`` when it shuts down.

    ``host`` is where browsers find it, ``taskset`` where a ``reset`` without a task id draws from;
    ``session_timeout_s``: see ``SESSION_TIMEOUT_S``. With ``ENABLE_WEB_INTERFACE=true`` in the process's
    environment it has OpenEnv's web page.
    """
    app: FastAPI = create_app(
        functools.partial(OpenEnvironment, provider, taskset),
        ToolCall,
        ToolResult,
        env_name="hintloop",
        concurrency_config=ConcurrencyConfig(
            max_concurrent_envs=max_sessions, session_timeout=session_timeout_s
        ),
        state_cls=CodingState,
        mode="simulation",
    )
    app.add_middleware(_Gate, host=host)
    app.router.on_shutdown.append(provider.close)
    return app


def local_app() -> FastAPI:
    """The server with local sandboxes: what ``openenv.yaml`` names for hosts that start it by themselves."""
    return create_server_app(LocalProvider())


class PortTaken(OSError):
    """Another program listens on the port."""


class _Server(uvicorn.Server):
    """Announces that it is ready, returns after SIGTERM instead of dying, and ends the sandboxes first."""

    def __init__(self, config: uvicorn.Config, provider: SandboxProvider, url: str, ready_file: Path | None):
        super().__init__(config)
        self._provider = provider
        self._url = url
        self._ready_file = ready_file

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.force_exit = self.should_exit
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self._ready_file is not None:
            _write_atomically(self._ready_file, self._url + "\n")

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await asyncio.to_thread(self._provider.close)  # what runs in them ends now, and with it every step
        await super().shutdown(sockets)


def serve(
    provider: SandboxProvider,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    taskset: str = DEFAULT_TASKSET,
    max_sessions: int = MAX_SESSIONS,
    session_timeout_s: float = SESSION_TIMEOUT_S,
    ready_file: Path | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT, then close all sandboxes and return.

    ``port`` 0 takes a free one. ``ready_file`` gets the URL once connections are accepted, and is removed at
    the end; one left by an earlier run is removed at the start. The others: see ``create_server_app``. There
    is no authentication: any ``host`` but loopback belongs on a private network. Raises ``PortTaken``, or
    another ``OSError`` for a bad address.
    """
    sock = _bind(host, port)
    url = f"http://[{host}]" if ":" in host else f"http://{host}"
    if host not in _LOOPBACK:
        structlog.get_logger().warning(
            "whoever reaches this address can run code in its sandboxes", host=host
        )
    if ready_file is not None:
        ready_file.unlink(missing_ok=True)
    app = create_server_app(
        provider, host=host, taskset=taskset, max_sessions=max_sessions, session_timeout_s=session_timeout_s
    )
    config = uvicorn.Config(
        app,
        ws="websockets-sansio",
        ws_max_size=MAX_MESSAGE_BYTES,
        ws_per_message_deflate=False,
        ws_ping_interval=None,  # an agent that computes for minutes answers no ping, and is well
        log_level="warning",
        log_config=None,
        access_log=False,
        timeout_graceful_shutdown=_SHUTDOWN_S,
    )
    try:
        _Server(config, provider, f"{url}:{sock.getsockname()[1]}", ready_file).run(sockets=[sock])
    finally:
        provider.close()
        if ready_file is not None:
            ready_file.unlink(missing_ok=True)


def _bind(host: str, port: int) -> socket.socket:
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # asyncio sets it for its own sockets only
        sock.bind((host, port))
        sock.listen(1)  # binding alone succeeds beside a socket that is bound but does not listen yet
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            raise PortTaken(error.errno, f"port {port} on {host} is taken; choose another or 0") from None
        raise
    return sock


def _write_atomically(path: Path, text: str) -> None:
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    part.write_text(text)
    part.replace(path)
