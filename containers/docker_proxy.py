"""A proxy before the Docker engine's socket that lets through what sandboxes need, see ``docker_rules``.

``python -m hintloop.containers.docker_proxy --listen SOCKET --name NAME``. One request per connection, each sent to the
engine on a connection of its own. Whatever was made through it is removed when it ends, and when it starts again after
it was killed: a sandbox ends with its connection, and all of those went through here.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hintloop.containers.docker_rules import (
    IMAGES,
    MAX_BODY,
    Limits,
    Refused,
    Request,
    is_own,
    of_engine,
    own_containers,
    understand,
)

ENGINE = "/var/run/docker.sock"
USER = 65532
"""Who the proxy is once it has found out which group may use the engine's socket, when it was started as root."""
MAX_CONNECTIONS = 1024
_BACKLOG = 128
_MAX_HEAD = 32 * 1024
_READ_S = 30.0
"""Seconds for a whole request to arrive."""
_ANSWER_S = 120.0
"""Seconds for the engine to say something; starting a container takes long on a busy machine."""
_REMOVE_S = 60.0
_CHUNK = 64 * 1024
_REASONS = {403: "Forbidden", 404: "Not Found", 502: "Bad Gateway", 503: "Service Unavailable"}


class Failed(Exception):
    """An answer that the proxy gives by itself."""

    def __init__(self, status: int, message: str) -> None:
        """``status`` of HTTP."""
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class Answer:
    """What the engine answered, whole."""

    status: int
    body: bytes

    def json(self) -> Any:
        """The body as data. ``Failed`` when it is none."""
        try:
            return json.loads(self.body)
        except ValueError:
            raise Failed(502, "the engine did not answer with JSON") from None


class Proxy:
    """Serves one socket."""

    def __init__(self, engine: str, limits: Limits) -> None:
        """``engine``: path of its socket."""
        self._engine = engine
        self._limits = limits
        self._num_open = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection."""
        self._num_open += 1
        try:
            await self._serve(reader, writer)
        except Refused as error:
            _say(f"refused: {error}")
            await _answer(writer, 403, f"hintloop's proxy: {error}")
        except Failed as error:
            await _answer(writer, error.status, f"hintloop's proxy: {error}")
        except TimeoutError:
            await _answer(writer, 502, "hintloop's proxy: that took too long")
        except (OSError, asyncio.IncompleteReadError) as error:
            await _answer(writer, 502, f"hintloop's proxy: {error}")
        finally:
            self._num_open -= 1
            await _close(writer)

    async def remove_all(self) -> int:
        """Remove every container that was made through here; how many there were."""
        rows = (await self._ask(own_containers(self._limits))).json()
        ids = [str(row["Id"]) for row in rows]
        for container in ids:
            query = {"force": "1", "v": "1"}
            answer = await self._ask(Request("DELETE", f"/containers/{container}", query))
            if answer.status not in (204, 404, 409):  # 409: somebody else removes it right now
                raise Failed(502, f"a container is not removed: {answer.body[:200]!r}")
        return len(ids)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._num_open > MAX_CONNECTIONS:
            raise Failed(503, "too many connections")
        async with asyncio.timeout(_READ_S):
            method, target, body = await _read_request(reader)
        request = understand(method, target, body, self._limits)
        if request.container is not None:
            await self._check_own(request.container)
        if request.creates:
            await self._check_room()
        if request.describes_engine:
            found = of_engine((await self._ask(request)).json())
            await _send(writer, 200, json.dumps(found).encode())
            return
        async with self._connection(request) as (engine_reader, engine_writer):
            if request.attaches:
                await _join(reader, writer, engine_reader, engine_writer)
            else:
                await _pour(engine_reader, writer, idle_s=_ANSWER_S)

    async def _check_own(self, container: str) -> None:
        answer = await self._ask(Request("GET", f"/containers/{container}/json", {}))
        if answer.status != 200 or not is_own(answer.json(), self._limits):
            raise Failed(404, f"no such container: {container}")

    async def _check_room(self) -> None:
        rows = (await self._ask(own_containers(self._limits))).json()
        if len(rows) >= self._limits.max_containers:
            raise Refused(f"there are {len(rows)} containers already")

    async def _ask(self, request: Request) -> Answer:
        """The whole answer to a question of our own."""
        async with asyncio.timeout(_ANSWER_S), self._connection(request) as (reader, _):
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
            status = int(head.split(" ", 2)[1])
            if "\r\ntransfer-encoding: chunked" in head:
                return Answer(status, await _read_chunks(reader))
            return Answer(status, await reader.read())

    @contextlib.asynccontextmanager
    async def _connection(
        self, request: Request
    ) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        """A connection to the engine on which the request was sent."""
        reader, writer = await asyncio.open_unix_connection(self._engine, limit=_CHUNK)
        try:
            headers = {"Host": "docker", "Content-Length": str(len(request.body)), **request.headers}
            if request.body:
                headers["Content-Type"] = "application/json"
            lines = [f"{request.method} {request.target} HTTP/1.1"]
            lines += [f"{name}: {value}" for name, value in headers.items()]
            writer.write("\r\n".join([*lines, "", ""]).encode("ascii") + request.body)
            await writer.drain()
            yield reader, writer
        finally:
            await _close(writer)


async def _read_request(reader: asyncio.StreamReader) -> tuple[str, str, bytes]:
    """Method, target and body. ``Refused`` for what is not plain HTTP/1.1."""
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("ascii")
        first, *lines = head.rstrip("\r\n").split("\r\n")
        method, target, protocol = first.split(" ")
        headers = [line.split(":", 1) for line in lines]
        fields = {name.strip().lower(): value.strip() for name, value in headers}
        length = int(fields.get("content-length") or 0)
    except (ValueError, asyncio.LimitOverrunError):
        raise Refused("that is no plain request") from None
    if protocol != "HTTP/1.1" or "transfer-encoding" in fields or len(fields) < len(headers):
        raise Refused("that is no plain request")
    if not 0 <= length <= MAX_BODY:
        raise Refused(f"a body of {length} bytes is too large")
    return method, target, await reader.readexactly(length)


async def _read_chunks(reader: asyncio.StreamReader) -> bytes:
    parts = []
    while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
        parts.append(await reader.readexactly(size))
        await reader.readexactly(2)
    return b"".join(parts)


async def _join(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    engine_reader: asyncio.StreamReader,
    engine_writer: asyncio.StreamWriter,
) -> None:
    """Client and container talk until the container's end. The end of the client's input is that of the container's."""

    async def up() -> None:
        try:
            await _pour(reader, engine_writer)
        finally:
            engine_writer.write_eof()

    going_up = asyncio.create_task(up())
    try:
        await _pour(engine_reader, writer)
    finally:
        going_up.cancel()
        await asyncio.gather(going_up, return_exceptions=True)  # the client may be gone: that is no failure


async def _pour(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, idle_s: float | None = None
) -> None:
    """Copy until the end. A sandbox may be silent for as long as it likes: ``idle_s`` None."""
    while True:
        async with asyncio.timeout(idle_s):
            data = await reader.read(_CHUNK)
        if not data:
            return
        writer.write(data)
        await writer.drain()


async def _answer(writer: asyncio.StreamWriter, status: int, message: str) -> None:
    with contextlib.suppress(OSError):  # nobody is there any more
        await _send(writer, status, json.dumps({"message": message}).encode())


async def _send(writer: asyncio.StreamWriter, status: int, body: bytes) -> None:
    head = f"HTTP/1.1 {status} {_REASONS.get(status, 'OK')}\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body)
    await writer.drain()


async def _close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


def listen_on(path: Path) -> socket.socket:
    """A socket that whoever can enter its folder may connect to. ``OSError``."""
    part = path.with_name(f"{path.name}.part")
    part.unlink(missing_ok=True)
    sock = socket.socket(socket.AF_UNIX)
    sock.bind(str(part))
    sock.listen(_BACKLOG)
    part.chmod(0o666)
    part.replace(path)  # whoever finds it can connect
    return sock


async def run(sock: socket.socket, engine: str, limits: Limits) -> None:
    """Serve until SIGTERM or SIGINT. ``OSError`` when there is no engine."""
    proxy = Proxy(engine, limits)
    if removed := await proxy.remove_all():
        _say(f"removed {removed} containers of a proxy that was killed")
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    server = await asyncio.start_unix_server(proxy.serve, sock=sock, limit=_MAX_HEAD)
    _say(f"listens for {limits.owner}")
    try:
        await stop.wait()
    finally:
        server.close()
        async with asyncio.timeout(_REMOVE_S):
            removed = await proxy.remove_all()
        _say(f"ended; {removed} containers removed")


def drop_root(engine: str) -> None:
    """Become ``USER``, in the group of the engine's socket, when this is root. ``OSError``."""
    if os.geteuid() == 0:
        group = os.stat(engine).st_gid
        os.setgroups([group])
        os.setgid(group)
        os.setuid(USER)


def _say(text: str) -> None:
    print(f"docker-proxy: {text}", file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    """Serve; the exit status is 1 when that fails."""
    parser = argparse.ArgumentParser(prog="docker-proxy", description="A restricted way to a Docker engine.")
    parser.add_argument("--listen", type=Path, required=True, help="socket to make")
    parser.add_argument("--name", required=True, help="whose containers are removed: those of this name")
    parser.add_argument("--engine", default=ENGINE, help="socket of the Docker engine")
    parser.add_argument("--image", action="append", help="image that may be used; * is anything; repeatable")
    options = parser.parse_args(argv)
    images = tuple(options.image) if options.image else IMAGES
    try:
        drop_root(options.engine)
        with listen_on(options.listen) as sock:
            asyncio.run(run(sock, options.engine, Limits(options.name, images=images)))
    except (OSError, Failed) as error:
        _say(f"{type(error).__name__}: {error}")
        sys.exit(1)
    finally:
        options.listen.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
