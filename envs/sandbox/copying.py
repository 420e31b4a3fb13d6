"""Copies of a working directory in parts: what one runner packs, another unpacks.

A part stands for itself, so neither runner keeps anything between two requests: each is asked for the entries
from a position on. Files, folders and links keep their modes and times; anything else is left out, and so are
folders nested deeper than is listed. Like all file access it runs while no process of the agent is alive.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
from collections.abc import Generator, Iterator

from hintloop.envs.sandbox import files

PART = 4 * 1024 * 1024
"""Content bytes of one part, about."""
_ENTRIES = 2000
"""Entries of one part."""


def pack(root: str, position: list[int]) -> tuple[bytes, list[int] | None]:
    """The part from ``position`` (number of the entry, offset in its content) and where the next one starts.

    ``OSError`` when something cannot be read.
    """
    first, offset = position
    entries: list[list[object]] = []
    content = bytearray()
    follows: list[int] | None = None
    with contextlib.closing(_walk(root, "")) as walk:
        for number, (path, kind, info) in enumerate(walk):
            if number < first:
                continue
            if len(content) >= PART or len(entries) >= _ENTRIES:
                follows = [number, 0]
                break
            start = offset if number == first else 0
            entry = [path, kind, stat.S_IMODE(info.st_mode), info.st_mtime_ns]
            if kind == "file":
                piece = _piece(os.path.join(root, path), info, start, PART - len(content))
                content += piece
                entries.append([*entry, start, len(piece)])
                if start + len(piece) < info.st_size:
                    follows = [number, start + len(piece)]
                    break
            else:
                entries.append([*entry, os.readlink(os.path.join(root, path)) if kind == "link" else ""])
    return json.dumps(entries).encode() + b"\n" + content, follows


def unpack(root: str, part: bytes) -> None:
    """Write one part into ``root``, which held nothing before the first. ``OSError``."""
    head, _, content = part.partition(b"\n")
    taken = 0
    for path, kind, mode, time, *rest in json.loads(head):
        if path.startswith("/") or ".." in path.split("/"):
            raise PermissionError(f"outside of the working directory: {path[:200]!r}")
        full = os.path.join(root, path)
        if kind == "file":
            start, size = rest
            _write_piece(full, start, content[taken : taken + size])
            taken += size
        elif kind == "folder":
            os.mkdir(full, 0o700)
        elif kind == "link":
            os.symlink(rest[0], full)
        if kind in ("file", "left"):
            os.utime(full, ns=(time, time), follow_symlinks=False)
            os.chmod(full, mode)


def _walk(root: str, folder: str) -> Generator[tuple[str, str, os.stat_result], None, None]:
    """All entries in a fixed order; a folder comes before what is in it (``folder``) and after it (``left``)."""
    with os.scandir(os.path.join(root, folder)) as found:
        entries = sorted(found, key=lambda entry: entry.name)
    for entry in entries:
        path = os.path.join(folder, entry.name)
        info = entry.stat(follow_symlinks=False)
        if stat.S_ISDIR(info.st_mode) and path.count("/") < files.MAX_DEPTH:
            yield path, "folder", info
            with _readable(os.path.join(root, path), info.st_mode):
                yield from _walk(root, path)
            yield path, "left", info
        elif stat.S_ISREG(info.st_mode):
            yield path, "file", info
        elif stat.S_ISLNK(info.st_mode):
            yield path, "link", info


@contextlib.contextmanager
def _readable(path: str, mode: int) -> Iterator[None]:
    """The agent may have taken its own right to look: give it back for a moment."""
    needed = 0o500 if stat.S_ISDIR(mode) else 0o400
    closed = mode & needed != needed
    if closed:
        os.chmod(path, stat.S_IMODE(mode) | 0o700)
    try:
        yield
    finally:
        if closed:
            os.chmod(path, stat.S_IMODE(mode))


def _piece(path: str, info: os.stat_result, start: int, size: int) -> bytes:
    with _readable(path, info.st_mode):
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        return os.pread(fd, max(0, min(size, info.st_size - start)), start)
    finally:
        os.close(fd)


def _write_piece(path: str, start: int, data: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        while data:
            written = os.pwrite(fd, data, start)
            data, start = data[written:], start + written
    finally:
        os.close(fd)
