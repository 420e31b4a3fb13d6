"""Sandboxes on this machine, without Docker: Linux namespaces, a private root and resource limits.

One zygote process forks a runner per sandbox; see ``zygote`` and ``isolation``. Where the kernel or an outer
container forbids namespaces the provider still works and says truthfully what ``isolation`` is left.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Self

import structlog

from hintloop.envs.sandbox import wire
from hintloop.envs.sandbox.base import CallResult, ExecResult, SandboxDead, Status
from hintloop.envs.sandbox.isolation import NAMESPACES
from hintloop.envs.sandbox.spawn import ZygoteProcess

_START = 10.0
"""Seconds for a sandbox to start."""
_GRACE = 5.0
"""Seconds beyond its own timeout before a runner counts as dead."""
_CLOSE = 2.0
"""Seconds that a runner gets to end by itself."""
_STATUS = {"timeout": Status.TIMEOUT, "memory": Status.OOM, "flood": Status.OUTPUT_CAPPED}


class LocalSandbox:
    """One sandbox; see ``base.Sandbox``. Made by ``LocalProvider.start``."""

    def __init__(self, sock: socket.socket, isolation: str, on_close: Callable[[bool], None]):
        self.isolation = isolation
        self._sock = sock
        self._on_close = on_close
        self._asking = threading.Lock()
        self._closing = threading.Lock()
        self._closed = False

    def exec(self, command: str, *, timeout: float, stdin: bytes = b"") -> ExecResult:
        """Run a shell command; its whole process tree is dead when this returns. Raises ``SandboxDead``."""
        code = command.encode("utf-8", "surrogatepass")
        if len(code) + len(stdin) > wire.MAX_BODY:
            return ExecResult(Status.NONZERO, 126, "cannot run: too long\n", 0.0)
        header, body = self._ask(
            {"op": "exec", "split": len(code), "timeout": timeout}, code + stdin, timeout
        )
        return _exec_result(header, body)

    def call_function(
        self, path: str, function: str, calls: Sequence[Sequence[Any]], *, timeout: float
    ) -> list[CallResult]:
        """Call a function once per argument list in a fresh process; see ``base.Sandbox``."""
        if not calls:
            return []
        body = "\n".join(json.dumps(list(arguments)) for arguments in calls).encode()
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
        files: list[str] = self._ask({"op": "list"})[0]["files"]
        return files

    def fill(self, files: dict[str, str]) -> None:
        """Write many text files at once. ``ValueError`` when they do not fit, ``SandboxDead``."""
        header, _ = self._ask({"op": "fill"}, json.dumps(files).encode(), _START)
        if "refused" in header or "missing" in header:
            raise ValueError(f"cannot write the files: {header}")

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


def _reaches_end(sock: socket.socket, deadline: float) -> bool:
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
    return ExecResult(status, None if end == "timeout" else code, output, header["seconds"])


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
        answer = json.loads(line, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        return CallResult(error=f"{type(error).__name__}: the result is not JSON")
    if type(answer) is dict and answer.keys() == {"value"}:
        return CallResult(value=answer["value"])
    if type(answer) is dict and answer.keys() == {"error"} and type(answer["error"]) is str:
        return CallResult(error=answer["error"])
    return CallResult(error="Exited: the results are not genuine")


def _no_constant(text: str) -> None:
    raise ValueError(f"{text} is not JSON")


class LocalProvider:
    """Sandboxes forked from one zygote; see ``base.SandboxProvider``. Threads may share it.

    ``namespaces`` are those to try for. None at all is the fallback of a host that allows none.
    """

    def __init__(self, namespaces: Sequence[str] = tuple(NAMESPACES)):
        self._wanted = tuple(namespaces)
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._open: dict[int, LocalSandbox] = {}
        self._closed = False
        self._zygote = ZygoteProcess(self._wanted)
        self.isolation = self._zygote.isolation
        missing = sorted({"user", "pid", "mount", "net"} - set(self.isolation.split("+")))
        if missing:
            structlog.get_logger().warning("weak_sandbox", isolation=self.isolation, missing=missing)

    @property
    def zygote_pid(self) -> int:
        """Process id of the zygote, for measurements."""
        return self._zygote.pid

    def start(self, files: dict[str, str]) -> LocalSandbox:
        """A fresh sandbox with ``files``. ``SandboxDead``; ``ValueError`` when they do not fit into it."""
        try:
            return self._start_once(files)
        except SandboxDead:
            if self._closed or self._zygote.alive():
                raise
            return self._start_once(files)

    def close(self) -> None:
        """Close all sandboxes that are still open, and the zygote."""
        with self._lock:
            self._closed = True
            sandboxes = list(self._open.values())
        for sandbox in sandboxes:
            sandbox.close()
        self._zygote.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start_once(self, files: dict[str, str]) -> LocalSandbox:
        ours, theirs = socket.socketpair()
        with theirs, self._lock:
            number = next(self._numbers)
            try:
                zygote = self._living_zygote()
                zygote.order(f"start {number}", [theirs])
            except OSError as error:
                ours.close()
                self._zygote.stop()
                raise SandboxDead(f"the zygote is gone: {error}") from None
            except SandboxDead:
                ours.close()
                raise
            sandbox = LocalSandbox(ours, zygote.isolation, lambda clean: self._forget(number, zygote, clean))
            self._open[number] = sandbox
        try:
            sandbox.fill(files)
        except ValueError:
            sandbox.close()
            raise
        return sandbox

    def _living_zygote(self) -> ZygoteProcess:
        if self._closed:
            raise SandboxDead("the provider is closed")
        if not self._zygote.alive():
            self._zygote.stop()
            self._zygote = ZygoteProcess(self._wanted)
            self.isolation = self._zygote.isolation
        return self._zygote

    def _forget(self, number: int, zygote: ZygoteProcess, clean: bool) -> None:
        with self._lock:
            self._open.pop(number, None)
            if not clean:
                with contextlib.suppress(OSError):
                    zygote.order(f"kill {number}")
