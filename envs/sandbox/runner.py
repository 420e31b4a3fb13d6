"""The first process of a sandbox: it serves its server's requests, one at a time, until the server closes.

No process of the agent is alive between two requests. The runner is process 1 of its pid namespace, so when
it ends, the kernel kills whatever is left.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
import zlib
from collections.abc import Collection
from typing import Any

from hintloop.envs.sandbox import calls, copying, files, layout, limits, wire
from hintloop.envs.sandbox.commands import run_command
from hintloop.envs.sandbox.processes import ServerGone, Tree

_TICK = 20_000_000
"""Nanoseconds in which a file may change twice and carry the same time."""
_PREFIX = os.path.realpath(sys.base_prefix)


def environment(root: str) -> dict[str, str]:
    """All that a command finds in its environment, unless its task or an image has more."""
    path = f"{_PREFIX}/bin:/usr/local/bin:/usr/bin:/bin"
    found = {
        "PATH": path,
        "HOME": root,
        "LANG": "C.UTF-8",
        "PAGER": "cat",
        "GIT_PAGER": "cat",
        "GIT_TERMINAL_PROMPT": "0",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    if os.path.isdir(layout.PACKAGES):
        found |= {"PATH": f"{path}:{layout.PROGRAMS}", "PYTHONPATH": layout.PACKAGES}
        found |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # of whatever else this machine's Python has
    return found


def limit_resources(memory: int, disk: int, *, num_processes: bool) -> None:
    """Bound this process and all that it starts: bytes of address space, and of one file; see ``limits``.

    ``num_processes`` too, which is right only where the kernel counts them per user namespace.
    """
    bounds = {
        resource.RLIMIT_AS: memory,
        resource.RLIMIT_FSIZE: max(disk, limits.VERIFIER),
        resource.RLIMIT_NOFILE: limits.OPEN_FILES,
        resource.RLIMIT_CORE: 0,
    }
    if num_processes:
        bounds[resource.RLIMIT_NPROC] = limits.PROCESSES
    for kind, value in bounds.items():
        resource.setrlimit(kind, (value, value))


class Runner:
    """One sandbox, whose server is at the other end of ``sock``. ``folders`` may be used beside ``root``."""

    def __init__(self, sock: wire.Channel, root: str, tree: Tree, folders: Collection[str]):
        self._sock = sock
        self._root = root
        self._tree = tree
        self._folders = folders
        self._environment = environment(root)
        self._at_start: dict[str, files.Stamp | None] = {}
        """The files that the sandbox began with; None for one that has changed already."""
        self._sums: dict[str, int] = {}
        """Of those that are so new that a change could leave the time as it is."""

    def serve(self) -> None:
        """Answer requests until the server closes its end; then kill what is left."""
        try:
            while True:
                header, body = wire.receive(self._sock)
                wire.send(self._sock, wire.pack(*self._answer(header, body)))
        except (EOFError, ServerGone, BrokenPipeError, ConnectionResetError):
            self._tree.kill()

    def _answer(self, header: dict[str, Any], body: bytes) -> wire.Message:
        try:
            return self._handle(header, body)
        except FileNotFoundError as error:
            return {"missing": str(error)}, b""
        except (OSError, ValueError) as error:
            return {"refused": f"{type(error).__name__}: {error}"[: limits.ERROR_CHARS]}, b""

    def _handle(self, header: dict[str, Any], body: bytes) -> wire.Message:
        op, root, tree, sock = header["op"], self._root, self._tree, self._sock
        if op == "call":
            path, function, timeout = header["path"], header["function"], header["timeout"]
            return calls.run_calls(root, path, function, body, tree=tree, server=sock, timeout=timeout)
        if op == "exec":
            command, stdin = body[: header["split"]], body[header["split"] :]
            found = {**self._environment, **header["env"]}
            timeout, grace = header["timeout"], header["grace"]
            return run_command(command, stdin, found, tree=tree, server=sock, timeout=timeout, grace=grace)
        if op == "read":
            return {}, files.read(*self._locate(header["path"]))
        if op == "write":
            files.write(*self._locate(header["path"]), body)
            return {}, b""
        if op == "list":
            return {"files": files.list_files(root)}, b""
        if op == "pack":
            part, follows = copying.pack(root, header["position"])
            return {"next": follows}, part
        if op == "unpack":
            copying.unpack(root, body)
            return {}, b""
        if op == "fill":
            for path, text in json.loads(body).items():
                files.write(*self._locate(path), text.encode("utf-8", "surrogateescape"))
            return {}, b""
        if op == "begin":
            self._begin(**json.loads(body))
            return {}, b""
        if op == "changes":
            return {}, json.dumps(self._changes()).encode()
        raise ValueError(f"unknown request {op!r}")

    def _locate(self, path: str) -> tuple[str, str]:
        return files.locate(self._root, path, self._folders)

    def _begin(self, changed: list[str], removed: list[str]) -> None:
        """From here on changes count, and those that are named have happened already."""
        now: dict[str, files.Stamp | None] = dict(files.stamps(self._root))
        if len(now) > limits.WATCHED_FILES:
            raise OSError(f"more than {limits.WATCHED_FILES} files in the working directory")
        just_now = time.time_ns() - _TICK
        self._sums = {path: self._sum(path) for path, stamp in now.items() if stamp and stamp[2] > just_now}
        self._at_start = now | dict.fromkeys([*changed, *removed])

    def _sum(self, path: str) -> int:
        try:
            return zlib.crc32(files.read(self._root, path))
        except OSError:  # too large, or closed by the agent
            return -1

    def _changes(self) -> dict[str, Any]:
        """Paths of regular files that changed since the start, and of those that are gone, sorted and capped."""
        before, now = self._at_start, files.stamps(self._root)
        new = {path for path in self._sums.keys() & now.keys() if self._sum(path) != self._sums[path]}
        changed = sorted(path for path, stamp in now.items() if before.get(path) != stamp or path in new)
        removed = sorted(before.keys() - now.keys()) if len(now) <= limits.WATCHED_FILES else []
        cap = limits.CHANGED_FILES
        left_out = max(0, len(changed) - cap) + max(0, len(removed) - cap)
        return {"changed": changed[:cap], "removed": removed[:cap], "left_out": left_out}
