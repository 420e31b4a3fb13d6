"""A sandbox as its server sees it: a runner that answers requests on a connection.

Every implementation ends in this: what differs is only how the runner was started, and what kills it.
"""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from hintloop.envs.sandbox import values, wire
from hintloop.envs.sandbox.base import CallResult, Changes, ExecResult, SandboxDead, Status

_START = 10.0
"""Seconds for a sandbox to start."""
_GRACE = 30.0
"""Seconds beyond its own timeout before a runner counts as dead; it may have many processes to kill."""
_CLOSE = 2.0
"""Seconds that a runner gets to end by itself."""
_COPY = 20.0
"""Seconds for one part of a copy, or a look at all files."""
_FILL = 4 * 1024 * 1024
"""Characters of the files that are written at once."""
_STATUS = {"timeout": Status.TIMEOUT, "memory": Status.OOM, "flood": Status.OUTPUT_CAPPED}


class Connection(wire.Channel, Protocol):
    """The server's end: a connected socket, or what behaves like one."""

    def shutdown(self, how: int, /) -> None:
        """Say that nothing more will be sent."""
        ...


class RunnerSandbox:
    """One sandbox; see ``base.Sandbox``. Made by a provider's ``start``."""

    def __init__(
        self,
        sock: Connection,
        isolation: str,
        *,
        env: dict[str, str],
        on_close: Callable[[bool], None],
        start_other: Callable[[], RunnerSandbox],
    ):
        """``env`` is for every command.

        ``on_close`` is told, once, whether the runner ended by itself; ``start_other`` gives an empty sandbox.
        """
        self.isolation = isolation
        self.env = env
        self._sock = sock
        self._on_close = on_close
        self._start_other = start_other
        self._asking = threading.Lock()
        self._closing = threading.Lock()
        self._closed = False

    def exec(
        self,
        command: str,
        *,
        timeout: float,
        stdin: bytes = b"",
        env: dict[str, str] | None = None,
        grace: float | None = None,
    ) -> ExecResult:
        """Run a shell command; its whole process tree is dead when this returns. Raises ``SandboxDead``."""
        code = command.encode("utf-8", "surrogatepass")
        if len(code) + len(stdin) > wire.MAX_BODY:
            return ExecResult(Status.NONZERO, 126, "cannot run: too long\n", 0.0)
        header = {"op": "exec", "split": len(code), "timeout": timeout, "grace": grace}
        header["env"] = {**self.env, **(env or {})}
        return _exec_result(*self._ask(header, code + stdin, timeout + (grace or 0.0)))

    def call_function(
        self, path: str, function: str, calls: Sequence[Sequence[Any]], *, timeout: float
    ) -> list[CallResult]:
        """Call a function once per argument list in a fresh process; see ``base.Sandbox``.

        Raises ``values.NotData`` for arguments that are no plain data.
        """
        if not calls:
            return []
        body = "\n".join(values.encode(list(arguments), wire.MAX_BODY) for arguments in calls).encode()
        request = {"op": "call", "path": path, "function": function, "timeout": timeout}
        return _call_results(*self._ask(request, body, timeout), len(calls))

    def read(self, path: str) -> bytes:
        """Content of a file, at most 1 MiB. ``FileNotFoundError``, ``PermissionError``, ``SandboxDead``."""
        return self._ask_about_file({"op": "read", "path": path})[1]

    def write(self, path: str, data: bytes) -> None:
        """Write a file of at most 4 MiB whole, making folders. ``PermissionError`` or ``SandboxDead``."""
        try:
            self._ask_about_file({"op": "write", "path": path}, data)
        except FileNotFoundError as error:
            raise PermissionError(str(error)) from None

    def list_files(self) -> list[str]:
        """All regular files, sorted, at most 1,000."""
        files: list[str] = self._ask({"op": "list"}, b"", _COPY)[0]["files"]
        return files

    def changes(self) -> Changes:
        """What differs from the start; see ``base.Sandbox``."""
        header, body = self._ask({"op": "changes"}, b"", _COPY)
        if "refused" in header or "missing" in header:
            raise SandboxDead(f"the files cannot be looked at: {header}")
        return Changes(**json.loads(body))

    def fill(self, files: dict[str, str]) -> None:
        """Write what the sandbox begins with. ``ValueError`` when it does not fit, ``SandboxDead``."""
        for part in _parts(files):
            header, _ = self._ask({"op": "fill"}, json.dumps(part).encode(), _START)
            if "refused" in header or "missing" in header:
                raise ValueError(f"cannot write the files: {header}")
        self._begin([], [])

    def fork(self) -> RunnerSandbox:
        """A second sandbox that holds a copy of the working directory; see ``base.Sandbox``."""
        other = self._start_other()
        try:
            self._copy_to(other)
        except BaseException:
            other.close()
            raise
        return other

    def close(self) -> None:
        """Kill every process and remove every file of the sandbox. Never raises; safe to call twice."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)
        clean = self._asking.acquire(timeout=_CLOSE)
        if clean:
            clean = _reaches_end(self._sock, time.monotonic() + _CLOSE)
            self._asking.release()
        self._on_close(clean)
        with self._asking:
            self._sock.close()

    def _begin(self, changed: list[str], removed: list[str]) -> None:
        body = json.dumps({"changed": changed, "removed": removed}).encode()
        header, _ = self._ask({"op": "begin"}, body, _COPY)
        if "refused" in header or "missing" in header:
            raise SandboxDead(f"the sandbox cannot begin: {header}")

    def _copy_to(self, other: RunnerSandbox) -> None:
        changes = self.changes()
        position: list[int] | None = [0, 0]
        while position is not None:
            header, part = self._ask({"op": "pack", "position": position}, b"", _COPY)
            if "refused" not in header and "missing" not in header:
                position = header["next"]
                header, _ = other._ask({"op": "unpack"}, part, _COPY)
            if "refused" in header or "missing" in header:
                raise SandboxDead(f"the working directory cannot be copied: {header}")
        other._begin(changes.changed, changes.removed)

    def _ask_about_file(self, header: dict[str, Any], body: bytes = b"") -> wire.Message:
        if len(header["path"]) > 4096 or len(body) > wire.MAX_BODY:
            raise PermissionError("path or content too long")
        answer, content = self._ask(header, body)
        if "missing" in answer:
            raise FileNotFoundError(answer["missing"])
        if "refused" in answer:
            raise PermissionError(answer["refused"])
        return answer, content

    def _ask(self, header: dict[str, Any], body: bytes = b"", timeout: float = 0.0) -> wire.Message:
        """One request and its answer; whatever goes wrong between, this sandbox is closed then.

        ``ValueError`` for a request that is too large to be sent.
        """
        message = wire.pack(header, body)
        problem: object
        with self._asking:
            if self._closed:
                raise SandboxDead("the sandbox is closed")
            deadline = time.monotonic() + timeout + _GRACE
            try:
                wire.send(self._sock, message, deadline=deadline)
                answer = wire.receive(self._sock, deadline=deadline)
                problem = answer[0].get("failed")
            except (OSError, EOFError, ValueError) as error:
                problem = error
        if problem is None:
            return answer
        self.close()
        raise SandboxDead(f"the sandbox failed: {problem}")


def _parts(files: dict[str, str]) -> Iterator[dict[str, str]]:
    part: dict[str, str] = {}
    size = 0
    for path, text in files.items():
        if part and size + len(text) > _FILL:
            yield part
            part, size = {}, 0
        part[path] = text
        size += len(text)
    yield part


def _reaches_end(sock: Connection, deadline: float) -> bool:
    """Whether the peer closes its end before the deadline."""
    try:
        while True:
            sock.settimeout(max(0.001, deadline - time.monotonic()))
            if not sock.recv(65536):
                return True
            if time.monotonic() > deadline:
                return False
    except ConnectionResetError:
        return True
    except OSError:
        return False


def _exec_result(header: dict[str, Any], body: bytes) -> ExecResult:
    if "refused" in header or "missing" in header:
        raise SandboxDead(f"the command could not be started: {header}")
    end, code = header["end"], header["code"]
    output = body.decode("utf-8", errors="replace")
    if end == "processes":
        output += "\n[killed: too many processes]\n"
    status = _STATUS.get(end, Status.OK if code == 0 else Status.NONZERO)
    if end == "exit" and header["left_out"]:
        status = Status.OUTPUT_CAPPED
    exit_code = None if end == "timeout" else code
    return ExecResult(status, exit_code, output, header["seconds"], header["left_running"])


def _call_results(header: dict[str, Any], body: bytes, count: int) -> list[CallResult]:
    """One result per call. A process that ended badly has no results at all, unless it ran out of time."""
    if "refused" in header or "missing" in header:
        raise SandboxDead(f"the call could not be started: {header}")
    end, code = header["end"], header["code"]
    results = [_call_result(line) for line in body.split(b"\n")] if body else []
    if end == "timeout" or (end == "exit" and len(results) <= count):
        rest = "Timeout" if end == "timeout" else "Exited: the process ended before the call did"
        return (results + [CallResult(error=rest)] * count)[:count]
    problem = {
        "memory": "MemoryError",
        "processes": "OSError: too many processes",
        "died": f"Killed: {signal.Signals(-code).name}" if code < 0 else f"Exited: status {code}",
    }
    return [CallResult(error=problem.get(end, "Exited: the results are not genuine"))] * count


def _call_result(line: bytes) -> CallResult:
    try:
        answer = values.decode(line.decode("ascii"))
    except (ValueError, RecursionError) as error:
        return CallResult(error=f"{type(error).__name__}: the result is not data")
    if type(answer) is dict and answer.keys() == {"value"}:
        return CallResult(value=answer["value"])
    if type(answer) is dict and answer.keys() == {"error"} and type(answer["error"]) is str:
        return CallResult(error=answer["error"])
    return CallResult(error="Exited: the results are not genuine")
