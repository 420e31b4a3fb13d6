"""Where journals and weights live: a few file operations with the same promises on every fsspec filesystem.

Object stores make an object visible only when it is complete, so one put is atomic there. On a local disk the
same comes from a temporary file that is flushed to the disk and then linked or renamed into place. Names of
temporary files start with a dot and end with ``.tmp``; whoever lists a folder ignores them.

Remote filesystems raise what their libraries raise, such as botocore's own errors for a server that is not there. A
store raises ``OSError`` for all of it, so that whoever waits for a storage knows its failures from bugs.
"""

from __future__ import annotations

import errno
import io
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import wraps
from pathlib import Path
from typing import IO, Any, Concatenate, ParamSpec, TypeVar, cast
from uuid import uuid4

import fsspec  # type: ignore[import-untyped]
from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]

CHUNK_BYTES = 8 << 20
STALE_SECONDS = 3600.0
"""A temporary file that nothing was written to for this long belongs to a process that died."""
REQUESTS = 8
"""Requests that are made at the same time."""

_NO_HARD_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}

_SECRETS = re.compile(r"(?<=//)[^/@\s]*@|\?[^\s'\"]+")
"""Where a URI may hold a password or a token: in front of its host, and in its query."""

P = ParamSpec("P")
T = TypeVar("T")


def _translated(do: Callable[Concatenate[Store, P], T]) -> Callable[Concatenate[Store, P], T]:
    """A method of ``Store`` that raises ``OSError`` for whatever a remote filesystem raises."""

    @wraps(do)
    def call(store: Store, /, *args: P.args, **kwargs: P.kwargs) -> T:
        with store._failures():
            return do(store, *args, **kwargs)

    return call


class Store:
    """One folder on any filesystem that fsspec knows; ``uri`` may also be a plain local path."""

    def __init__(self, uri: str | Path) -> None:
        self.uri = str(uri)
        fs, root = fsspec.core.url_to_fs(os.path.expanduser(self.uri))
        self._fs: Any = fs
        self.root: str = root.rstrip("/")
        self.is_local: bool = isinstance(fs, LocalFileSystem)

    def path(self, name: str) -> str:
        """The full path of ``name`` inside the store, as the filesystem wants it."""
        return f"{self.root}/{name}" if name else self.root

    @_translated
    def names(self, folder: str = "") -> list[str]:
        """Names in ``folder`` now, unsorted, without temporary files; empty when it is missing."""
        path = self.path(folder)
        self._fs.invalidate_cache(path)  # object stores would answer from an old listing
        try:
            found = os.listdir(path) if self.is_local else self._fs.ls(path, detail=False)
        except FileNotFoundError:
            return []
        names = [each.rstrip("/").rpartition("/")[2] for each in found]
        return [name for name in names if not _is_temporary(name)]

    @_translated
    def sizes(self) -> dict[str, int]:
        """Bytes of each file in the store now, by name, without temporary files."""
        self._fs.invalidate_cache(self.root)
        try:
            found = self._fs.ls(self.root, detail=True)
        except FileNotFoundError:
            return {}
        sizes = {info["name"].rpartition("/")[2]: info["size"] for info in found if info["type"] == "file"}
        return {name: size for name, size in sizes.items() if not _is_temporary(name)}

    @_translated
    def exists(self, name: str) -> bool:
        """Whether a file or folder of that name is there."""
        self._fs.invalidate_cache(self.path(name))
        if self.is_local:
            return os.path.exists(self.path(name))
        try:
            self._fs.info(self.path(name))  # ``exists`` of some filesystems takes any failure for a no
        except FileNotFoundError:
            return False
        return True

    @_translated
    def read(self, name: str) -> bytes:
        """The whole content. ``FileNotFoundError`` when it is missing."""
        return bytes(self._fs.cat_file(self.path(name)))

    def read_all(self, names: Sequence[str]) -> list[bytes]:
        """The contents of several files, read at once where that takes requests."""
        return self._each(self.read, names)

    @_translated
    def open(self, name: str) -> IO[bytes]:
        """The file, for reading at any position. ``FileNotFoundError`` when it is missing."""
        file = self._fs.open(self.path(name), "rb")
        return cast(IO[bytes], file if self.is_local else _RemoteFile(file, self._failures))

    @_translated
    def create(self, name: str, data: bytes) -> None:
        """Write a file that never changes again: it is there whole or not at all.

        Doing it twice with the same bytes is allowed, so a put whose answer got lost can be repeated.
        ``FileExistsError`` when the name holds other bytes; those are kept.
        Two writers at the same moment are told apart on a local disk and where the filesystem's put is
        conditional; elsewhere fsspec looks first and then writes.
        """
        try:
            if self.is_local:
                _create_local(Path(self.path(name)), data)
            else:
                self._fs.pipe_file(self.path(name), data, mode="create")
        except FileExistsError:
            if self.read(name) != data:
                raise FileExistsError(f"{self.path(name)} is there already, with other content") from None

    @_translated
    def replace(self, name: str, data: bytes) -> None:
        """Write a file whose readers see either the old content or the new one."""
        if self.is_local:
            target = Path(self.path(name))
            temporary = _write_temporary(target, data)
            os.replace(temporary, target)
            sync_folder(target.parent)
        else:
            self._fs.pipe_file(self.path(name), data)

    @_translated
    def write_chunks(self, name: str, chunks: Iterable[bytes]) -> None:
        """Write a file piece by piece; not atomic, so nothing may refer to it before this returns."""
        if self.is_local:
            Path(self.path(name)).parent.mkdir(parents=True, exist_ok=True)
        with self._fs.open(self.path(name), "wb") as file:
            for chunk in chunks:
                file.write(chunk)
            if self.is_local:
                file.flush()
                os.fsync(file.fileno())

    def sync(self, folder: str) -> None:
        """Make a local folder, with the names in it and in those below it, survive a power cut."""
        if self.is_local:
            sync_folder(Path(self.root))
            for path, _, _ in os.walk(self.path(folder)):
                sync_folder(Path(path))

    @_translated
    def remove(self, name: str) -> None:
        """Delete a file, or a folder with all it holds; nothing happens when it is missing."""
        if self.exists(name):
            self._fs.rm(self.path(name), recursive=True)

    def remove_all(self, names: Sequence[str]) -> None:
        """Delete files; nothing happens for those that are missing."""
        self._each(self._remove_file, names)

    def sweep(self, prefix: str) -> None:
        """Delete temporary files that dead processes left for names that start with ``prefix``."""
        if self.is_local:
            sweep_temporaries(Path(self.root), prefix)

    @_translated
    def _remove_file(self, name: str) -> None:
        with suppress(FileNotFoundError):
            self._fs.rm_file(self.path(name))

    @contextmanager
    def _failures(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError):
            raise
        except Exception as error:
            if self.is_local:
                raise
            name, text = (_SECRETS.sub("", each) for each in (self.uri, str(error) or type(error).__name__))
            raise OSError(" ".join(f"{name}: {text}".split())) from error

    def _each(self, do: Callable[[str], T], names: Sequence[str]) -> list[T]:
        if self.is_local:
            return [do(name) for name in names]
        with ThreadPoolExecutor(REQUESTS) as pool:
            return list(pool.map(do, names))


class _RemoteFile(io.RawIOBase):
    """A file of a remote filesystem, which asks for its content only when that is read."""

    def __init__(self, file: IO[bytes], failures: Callable[[], AbstractContextManager[None]]) -> None:
        super().__init__()
        self._file, self._failures = file, failures

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def read(self, size: int = -1, /) -> bytes:
        with self._failures():
            return self._file.read(size)

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        with self._failures():
            return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def close(self) -> None:
        self._file.close()
        super().close()


def read_chunks(file: IO[bytes]) -> Iterator[bytes]:
    """The rest of ``file`` in pieces of at most ``CHUNK_BYTES``."""
    while chunk := file.read(CHUNK_BYTES):
        yield chunk


def temporary_path(target: Path) -> Path:
    """A name beside ``target`` that no other process uses."""
    return target.with_name(f".{target.name}.{uuid4().hex}.tmp")


def sync_folder(folder: Path) -> None:
    """Flush the names in a folder to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sweep_temporaries(folder: Path, prefix: str) -> None:
    """Delete temporary files, for targets starting with ``prefix``, that are older than ``STALE_SECONDS``."""
    for path in folder.glob(f".{prefix}*.tmp"):
        if _is_temporary(path.name) and time.time() - _last_write(path) > STALE_SECONDS:
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def _is_temporary(name: str) -> bool:
    return name.startswith(".") and name.endswith(".tmp")


def _last_write(path: Path) -> float:
    """Newest modification time of a file, or of a folder and what it holds; now when it just went away."""
    try:
        return max(each.stat().st_mtime for each in (path, *path.rglob("*")))
    except FileNotFoundError:
        return time.time()


def _write_temporary(target: Path, data: bytes) -> Path:
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_path(target)
    try:
        with temporary.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return temporary


def _create_local(target: Path, data: bytes) -> None:
    temporary = _write_temporary(target, data)
    try:
        os.link(temporary, target)  # unlike a rename, fails when the name is taken
    except OSError as error:
        if error.errno not in _NO_HARD_LINKS:
            raise
        if target.exists():
            raise FileExistsError(target) from None
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(target.parent)
