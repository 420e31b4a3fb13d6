"""A lean HTTP/1.1 transport for httpx: one request after the other on each of many kept connections.

httpx's own transport takes about three times the CPU time for a streamed answer, most of it in a parser written
in Python and in a search through all connections, and the rollout process has hundreds of answers coming in.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import AsyncIterator
from urllib.parse import urlsplit

import httpx

KEEP_S = 2.0
"""An unused connection is closed before the server does it (uvicorn: after 5 s), which could cross a request."""
READ_BYTES = 1 << 16
MAX_PART_BYTES = 64 << 20
"""Largest piece of an answer that is taken in at once."""
_BROKEN = (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError)


def check_url(url: str) -> None:
    """``ValueError`` unless ``url`` can be the root of a server."""
    problem = "it lacks http:// or a host"
    try:
        httpx.URL(url)
        parts = urlsplit(url)
        if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0:
            return
    except (httpx.InvalidURL, ValueError) as error:
        problem = str(error)
    raise ValueError(f"{url!r} is no URL such as http://127.0.0.1:8000: {problem}")


class LeanTransport(httpx.AsyncBaseTransport):
    """For servers that are asked often: no proxies, no HTTP/2, and of the timeouts only that for connecting."""

    def __init__(self, *, connect_s: float) -> None:
        self._connect_s = connect_s
        self._idle: dict[tuple[str, int], list[_Connection]] = {}
        self._tls: ssl.SSLContext | None = None
        self._closed = False

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request and read the head of its answer. Raises httpx's transport errors."""
        connection = await self._connection(request.url)
        try:
            await connection.send(request)
            status, headers = await connection.head()
        except _BROKEN as error:
            connection.abort()
            raise httpx.RemoteProtocolError(f"no answer: {error!r}", request=request) from error
        except BaseException:  # cancelled: whatever comes now belongs to nobody
            connection.abort()
            raise
        return httpx.Response(
            status, headers=headers, stream=_Body(self, connection, headers), request=request
        )

    async def aclose(self) -> None:
        """Close what is idle now, and what becomes idle later."""
        self._closed = True
        for connections in self._idle.values():
            while connections:
                connections.pop().abort()
        await asyncio.sleep(0)  # they are closed in the loop's next round

    def give_back(self, connection: _Connection) -> None:
        """Keep a connection whose answer was read to its end."""
        connection.idle_since = time.monotonic()
        if self._closed:
            connection.abort()
            return
        idle = self._idle.setdefault(connection.place, [])
        while idle and not idle[0].fresh():
            idle.pop(0).abort()
        idle.append(connection)

    async def _connection(self, url: httpx.URL) -> _Connection:
        place = (url.host, url.port or (443 if url.scheme == "https" else 80))
        idle = self._idle.get(place, [])
        while idle:
            connection = idle.pop()
            if connection.fresh():
                return connection
            for old in (connection, *idle):  # these have been idle for even longer
                old.abort()
            idle.clear()
        if url.scheme == "https" and self._tls is None:
            self._tls = ssl.create_default_context()
        try:
            async with asyncio.timeout(self._connect_s):
                tls = self._tls if url.scheme == "https" else None
                reader, writer = await asyncio.open_connection(*place, ssl=tls)
        except TimeoutError:
            raise httpx.ConnectTimeout(f"no connection within {self._connect_s:g} s") from None
        except OSError as error:
            raise httpx.ConnectError(str(error)) from error
        return _Connection(place, reader, writer)


class _Connection:
    def __init__(
        self, place: tuple[str, int], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.place = place
        self.idle_since = 0.0
        self.reader = reader
        self._writer = writer

    def fresh(self) -> bool:
        """Whether the server has neither closed it nor is likely to do so."""
        return not self.reader.at_eof() and time.monotonic() - self.idle_since < KEEP_S

    async def send(self, request: httpx.Request) -> None:
        target = request.url.raw_path
        lines = [request.method.encode() + b" " + target + b" HTTP/1.1"]
        lines += [name + b": " + value for name, value in request.headers.raw]
        self._writer.write(b"\r\n".join(lines) + b"\r\n\r\n" + await request.aread())
        await self._writer.drain()

    async def head(self) -> tuple[int, httpx.Headers]:
        """Status and headers. ``ValueError`` for what is no HTTP."""
        first, *lines = (await self.reader.readuntil(b"\r\n\r\n"))[:-4].split(b"\r\n")
        version, status, *_ = first.split(b" ", 2)
        if not version.startswith(b"HTTP/1."):
            raise ValueError(f"not HTTP/1: {first!r}")
        pairs = [line.split(b":", 1) for line in lines]
        return int(status), httpx.Headers([(name.strip(), value.strip()) for name, value in pairs])

    def abort(self) -> None:
        """Close at once; nobody waits for it."""
        self._writer.transport.abort()


class _Body(httpx.AsyncByteStream):
    """The body of one answer; gives the connection back when it was read to its end."""

    def __init__(self, transport: LeanTransport, connection: _Connection, headers: httpx.Headers) -> None:
        self._transport = transport
        self._connection: _Connection | None = connection
        self._chunked = headers.get("transfer-encoding", "").lower() == "chunked"
        self._length = headers.get("content-length")
        self._keep = headers.get("connection", "").lower() != "close"

    async def __aiter__(self) -> AsyncIterator[bytes]:
        connection = self._connection
        assert connection is not None
        parts = self._chunks if self._chunked else self._plain
        try:
            async for part in parts(connection.reader):
                yield part
        except _BROKEN as error:
            raise httpx.RemoteProtocolError(f"the answer broke off: {error!r}") from error
        if self._keep:
            self._connection = None
            self._transport.give_back(connection)

    async def aclose(self) -> None:
        """Give up what was not read."""
        if self._connection is not None:
            self._connection.abort()
            self._connection = None

    async def _chunks(self, reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
        while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
            yield (await reader.readexactly(_checked(size) + 2))[:-2]
        while await reader.readuntil(b"\r\n") != b"\r\n":
            pass  # trailers

    async def _plain(self, reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
        if self._length is not None:
            if length := _checked(int(self._length)):
                yield await reader.readexactly(length)
            return
        self._keep = False
        while part := await reader.read(READ_BYTES):
            yield part


def _checked(size: int) -> int:
    if not 0 <= size <= MAX_PART_BYTES:
        raise ValueError(f"a part of {size} bytes")
    return size
