"""File access for a runner, confined to its working directory and the folders for who grades.

It runs inside the sandbox's own mounts, with the agent's rights, and only while no process of the agent is
alive. The kernel resolves every path beneath its folder (``openat2``), so a planted link leads nowhere else;
where there is no such call (gVisor, old Docker) it is given the resolved path, which nobody can change meanwhile.
In the folders for who grades no link is followed at all.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
from collections.abc import Collection, Iterator

from hintloop.envs.sandbox import layout, limits

_SYS_OPENAT2 = 437
_RESOLVE_NO_MAGICLINKS, _RESOLVE_NO_SYMLINKS, _RESOLVE_BENEATH = 0x02, 0x04, 0x08
MAX_DEPTH = 64
"""Folders nested deeper are not listed."""
_How = ctypes.c_uint64 * 3
_libc = ctypes.CDLL(None, use_errno=True)


Stamp = tuple[int, int, int]
"""Number, size and time of the last change of a file, which no program can set."""


def locate(workdir: str, path: str, others: Collection[str]) -> tuple[str, str]:
    """The folder that a path is to stay in, and the path below it: one of ``others``, or the working directory."""
    for root in others:
        if path.startswith(root + "/"):
            return root, path[len(root) + 1 :]
    for name in (workdir, *layout.WORKSPACE_NAMES):
        if path.startswith(name + "/") and os.path.realpath(name) == os.path.realpath(workdir):
            return workdir, path[len(name) + 1 :]
    return workdir, path


def read(root: str, path: str) -> bytes:
    """Content of a regular file. ``FileNotFoundError`` or another ``OSError``."""
    fd = _open_beneath(root, path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            raise PermissionError(f"not a regular file: {path[:200]!r}")
        if info.st_size > limits.READ:
            raise PermissionError(f"larger than {limits.READ} bytes: {path[:200]!r}")
        return os.read(fd, info.st_size)
    finally:
        os.close(fd)


def write(root: str, path: str, data: bytes) -> None:
    """Write a regular file whole, making folders; a new one that names its interpreter can be run. ``OSError``."""
    if len(data) > limits.WRITE:
        raise PermissionError(f"more than {limits.WRITE} bytes for {path[:200]!r}")
    flags, mode = os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK, 0o755 if data.startswith(b"#!") else 0o644
    try:
        fd = _open_beneath(root, path, flags, mode)
    except FileNotFoundError:
        _make_folders(root, path)
        fd = _open_beneath(root, path, flags, mode)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise PermissionError(f"not a regular file: {path[:200]!r}")
        os.ftruncate(fd, 0)
        while data:
            data = data[os.write(fd, data) :]
    finally:
        os.close(fd)


def list_files(root: str) -> list[str]:
    """Relative paths of all regular files, sorted, at most ``limits.LISTED_FILES``."""
    found = [os.fsencode(path).decode("utf-8", "replace") for path, _ in _regular_files(root)]
    return sorted(found)[: limits.LISTED_FILES]


def stamps(root: str) -> dict[str, Stamp]:
    """What tells a regular file from a changed one, by relative path; ``limits.WATCHED_FILES`` and one at most."""
    found: dict[str, Stamp] = {}
    for path, entry in _regular_files(root):
        info = entry.stat(follow_symlinks=False)
        found[path] = (info.st_ino, info.st_size, info.st_ctime_ns)
        if len(found) > limits.WATCHED_FILES:
            break
    return found


def _regular_files(root: str) -> Iterator[tuple[str, os.DirEntry[str]]]:
    folders = [""]
    while folders:
        folder = folders.pop()
        try:
            entries = list(os.scandir(os.path.join(root, folder)))
        except OSError:  # the agent has taken its own right to look
            continue
        for entry in entries:
            path = os.path.join(folder, entry.name)
            if entry.is_file(follow_symlinks=False):
                yield path, entry
            elif entry.is_dir(follow_symlinks=False) and path.count("/") < MAX_DEPTH:
                folders.append(path)


def _make_folders(root: str, path: str) -> None:
    """Make the folders that a file needs, each beneath the one before."""
    parts = [part for part in path.split("/")[:-1] if part not in ("", ".")]
    for count in range(1, len(parts) + 1):
        parent = _open_beneath(root, "/".join(parts[: count - 1]) or ".", os.O_PATH | os.O_DIRECTORY)
        try:
            os.mkdir(parts[count - 1], 0o755, dir_fd=parent)
        except FileExistsError:
            continue
        finally:
            os.close(parent)


def _open_beneath(root: str, path: str, flags: int, mode: int = 0) -> int:
    """Open a relative path without leaving ``root``. ``PermissionError`` when it would."""
    if not path or "\0" in path or path.startswith("/") or ".." in path.split("/"):
        raise PermissionError(f"the path must be relative and without '..': {path[:200]!r}")
    no_links = root in layout.VERIFIER
    resolve = _RESOLVE_BENEATH | (_RESOLVE_NO_SYMLINKS if no_links else _RESOLVE_NO_MAGICLINKS)
    how = _How(flags | os.O_CLOEXEC, mode, resolve)
    folder = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fd = _libc.syscall(_SYS_OPENAT2, folder, os.fsencode(path), how, ctypes.sizeof(how))
        number = ctypes.get_errno()
    finally:
        os.close(folder)
    if fd >= 0:
        return int(fd)
    if number in (errno.ENOSYS, errno.EPERM):
        return _open_by_name(root, path, flags | os.O_CLOEXEC, mode, no_links)
    if number == errno.ELOOP and no_links:
        raise PermissionError(f"a link: {path[:200]!r}")
    if number == errno.EXDEV:
        raise PermissionError(f"outside of the working directory: {path[:200]!r}")
    raise OSError(number, os.strerror(number), path[:200])


def _open_by_name(root: str, path: str, flags: int, mode: int, no_links: bool) -> int:
    real_root = os.path.realpath(root)
    real = os.path.realpath(os.path.join(real_root, path))
    if real != real_root and not real.startswith(real_root + "/"):
        raise PermissionError(f"outside of the working directory: {path[:200]!r}")
    if no_links and real != os.path.normpath(os.path.join(real_root, path)):
        raise PermissionError(f"a link: {path[:200]!r}")
    if path.endswith("/") or os.path.basename(path) in ("", "."):
        real += "/."  # as the kernel has it: only a folder can be meant
    return os.open(real, flags | (0 if flags & os.O_DIRECTORY else os.O_NOFOLLOW), mode)
