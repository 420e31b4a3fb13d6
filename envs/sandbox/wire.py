"""Messages between the server and a runner: a JSON header and raw bytes, both with their length in front.

Used on both sides of the sandbox wall, so it imports little and trusts no length that it reads.
"""

from __future__ import annotations

import json
import struct
import time
from typing import Any, Protocol

MAX_HEADER = 256 * 1024
"""Bytes; a listing of 1,000 files is the largest header."""
MAX_BODY = 16 * 1024 * 1024
_LENGTHS = struct.Struct(">II")

Message = tuple[dict[str, Any], bytes]


class Channel(Protocol):
    """What messages travel on: a connected socket, or what has the same few methods."""

    def fileno(self) -> int:
        """What to poll for a message."""
        ...

    def recv(self, size: int, /) -> bytes:
        """At least one byte; none at the end."""
        ...

    def sendall(self, data: bytes, /) -> None: ...
    def gettimeout(self) -> float | None: ...
    def settimeout(self, seconds: float | None, /) -> None: ...
    def close(self) -> None: ...


def pack(header: dict[str, Any], body: bytes = b"") -> bytes:
    """One message as bytes. ``ValueError`` when it is too large to be received."""
    text = json.dumps(header).encode()
    _check(len(text), len(body))
    return _LENGTHS.pack(len(text), len(body)) + text + body


def send(sock: Channel, message: bytes, *, deadline: float | None = None) -> None:
    """Send a packed message before ``deadline`` (``time.monotonic``; None: no limit). ``OSError``."""
    _set_timeout(sock, deadline)
    sock.sendall(message)


def receive(sock: Channel, *, deadline: float | None = None) -> Message:
    """The next message; the peer must not send a second one before it has an answer.

    ``EOFError`` when the peer closed, ``OSError`` on failure or past the deadline, ``ValueError`` for bytes
    that are no message.
    """
    data = bytearray()
    end = num_header = 0
    while not end or len(data) < end:
        _set_timeout(sock, deadline)
        part = sock.recv(65536)
        if not part:
            raise EOFError("the other end is closed")
        data += part
        if not end and len(data) >= _LENGTHS.size:
            num_header, num_body = _LENGTHS.unpack_from(data)
            _check(num_header, num_body)
            end = _LENGTHS.size + num_header + num_body
    if len(data) != end:
        raise ValueError("more bytes than the message has")
    start = _LENGTHS.size + num_header
    header = json.loads(data[_LENGTHS.size : start])
    if type(header) is not dict:
        raise ValueError("the header is no object")
    return header, bytes(data[start:])


def _check(num_header: int, num_body: int) -> None:
    if num_header > MAX_HEADER or num_body > MAX_BODY:
        raise ValueError(f"a message of {num_header} + {num_body} bytes is too large")


def _set_timeout(sock: Channel, deadline: float | None) -> None:
    if deadline is None:
        if sock.gettimeout() is not None:
            sock.settimeout(None)
        return
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("no answer before the deadline")
    sock.settimeout(left)
