"""The first process of a sandbox: it serves its server's requests, one at a time, until the server closes.

No process of the agent is alive between two requests. The runner is process 1 of its pid namespace, so when
it ends, the kernel kills whatever is left.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from typing import Any

from hintloop.envs.sandbox import calls, copying, files, limits, wire
from hintloop.envs.sandbox.commands import run_command
from hintloop.envs.sandbox.processes import ServerGone, Tree

_PREFIX = os.path.realpath(sys.base_prefix)


def environment(root: str) -> dict[str, str]:
    """All that a command finds in its environment."""
    return {
        "PATH": f"{_PREFIX}/bin:/usr/local/bin:/usr/bin:/bin",
        "HOME": root,
        "LANG": "C.UTF-8",
        "PAGER": "cat",
        "GIT_PAGER": "cat",
        "GIT_TERMINAL_PROMPT": "0",
        "PYTHONDONTWRITEBYTECODE": "1",
    }


def limit_resources(*, num_processes: bool) -> None:
    """Bound this process and all that it starts; see ``limits``.

    ``num_processes`` too, which is right only where the kernel counts them per user namespace.
    """
    bounds = {
        resource.RLIMIT_AS: limits.MEMORY,
        resource.RLIMIT_FSIZE: limits.DISK,
        resource.RLIMIT_NOFILE: limits.OPEN_FILES,
        resource.RLIMIT_CORE: 0,
    }
    if num_processes:
        bounds[resource.RLIMIT_NPROC] = limits.PROCESSES
    for kind, value in bounds.items():
        resource.setrlimit(kind, (value, value))


def serve(sock: wire.Channel, root: str, tree: Tree) -> None:
    """Answer requests until the server closes its end; then kill what is left."""
    try:
        while True:
            header, body = wire.receive(sock)
            wire.send(sock, wire.pack(*_answer(header, body, sock, root, tree)))
    except (EOFError, ServerGone, BrokenPipeError, ConnectionResetError):
        tree.kill()


def _answer(header: dict[str, Any], body: bytes, sock: wire.Channel, root: str, tree: Tree) -> wire.Message:
    try:
        return _handle(header, body, sock, root, tree)
    except FileNotFoundError as error:
        return {"missing": str(error)}, b""
    except (OSError, ValueError) as error:
        return {"refused": f"{type(error).__name__}: {error}"[: limits.ERROR_CHARS]}, b""


def _handle(header: dict[str, Any], body: bytes, sock: wire.Channel, root: str, tree: Tree) -> wire.Message:
    op = header["op"]
    if op == "call":
        path, function, timeout = header["path"], header["function"], header["timeout"]
        return calls.run_calls(root, path, function, body, tree=tree, server=sock, timeout=timeout)
    if op == "exec":
        command, stdin = body[: header["split"]], body[header["split"] :]
        timeout = header["timeout"]
        return run_command(command, stdin, environment(root), tree=tree, server=sock, timeout=timeout)
    if op == "read":
        return {}, files.read(root, header["path"])
    if op == "write":
        files.write(root, header["path"], body)
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
            files.write(root, path, text.encode("utf-8", "surrogatepass"))
        return {}, b""
    raise ValueError(f"unknown request {op!r}")
