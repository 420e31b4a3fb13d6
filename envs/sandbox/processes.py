"""The processes of a sandbox, as its runner sees them: wait for one, watch what all use, kill everything.

With a pid namespace the runner is process 1 of it, so ``kill(-1)`` reaches every process of the sandbox and
nothing else. Without one it adopts orphans and kills its descendants as ``/proc`` shows them.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import time
from collections.abc import Callable

from hintloop.envs.sandbox import limits
from hintloop.envs.sandbox.wire import Channel

MARKER = "\n[... {} bytes left out ...]\n"
_KILL = 20.0
"""Seconds to try to kill all descendants; one call is enough with a pid namespace, but gVisor is slow at it."""
_DRAIN = 2.0
"""Seconds to wait for the end of a pipe whose writers have all been killed."""
_LOOK = 0.003
"""Seconds between two looks at a process whose end the kernel does not announce."""
_PAGE = os.sysconf("SC_PAGE_SIZE")


class Tree:
    """All processes of the sandbox but the runner itself."""

    def __init__(self, own_namespace: bool, memory: int = limits.MEMORY):
        """``memory``: bytes that each process may use."""
        self._own_namespace = own_namespace
        self.memory = memory

    def kill(self) -> None:
        """Kill and reap them all; whatever they were about to start is dead too."""
        deadline = time.monotonic() + _KILL
        while True:
            for pid in [-1] if self._own_namespace else self._descendants():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            _reap_ready()
            if not (_has_children() if self._own_namespace else self._descendants()):
                return
            if time.monotonic() > deadline:
                raise TimeoutError("the processes multiply faster than they can be killed")
            time.sleep(0.0002)  # a fork under way may have been missed (gVisor), or one is still dying

    def outlives(self, pid: int, grace: float) -> bool:
        """Whether anything but ``pid``, which has ended, still runs after so many seconds more."""
        deadline = time.monotonic() + grace
        while self._descendants() - {pid}:
            if time.monotonic() > deadline:
                return True
            time.sleep(_LOOK)
        return False

    def excess(self) -> str | None:
        """What the processes have too much of together: ``memory``, ``processes`` or nothing."""
        pids = _all_pids() - {1} if self._own_namespace else self._descendants()
        if len(pids) > limits.PROCESSES:
            return "processes"
        memory = 0
        for pid in pids:
            text = _read(f"/proc/{pid}/statm")
            if text:
                _, resident, shared, *_ = map(int, text.split())
                memory += (resident - shared) * _PAGE
        return "memory" if memory > limits.TREE * self.memory else None

    def _descendants(self) -> set[int]:
        parents = {}
        for pid in _all_pids():
            text = _read(f"/proc/{pid}/stat")
            if text:
                state, parent = text.rpartition(")")[2].split()[:2]
                if state != "Z":
                    parents[pid] = int(parent)
        found: set[int] = set()
        new = {os.getpid()}
        while new:
            new = {pid for pid, parent in parents.items() if parent in new}
            found |= new
        return found


def _all_pids() -> set[int]:
    return {int(name) for name in os.listdir("/proc") if name.isdigit()}


def _read(path: str) -> str:
    try:
        with open(path, "rb") as file:
            return file.read().decode("utf-8", "replace")
    except OSError:
        return ""


def _has_children() -> bool:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def _reap_ready() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return


def oom_kills() -> int:
    """How many processes of this control group the kernel has killed for want of memory; 0 where it does not tell."""
    for path in ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control"):
        for line in _read(path).splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


class ServerGone(Exception):
    """The server closed its end while something was running."""


def supervise(
    pid: int,
    *,
    tree: Tree,
    server: Channel,
    timeout: float,
    output: int = -1,
    capture: Capture | None = None,
    ended: Callable[[], None] = lambda: None,
) -> tuple[str, int, int]:
    """Wait for process ``pid``, feeding what the pipe ``output`` gives to ``capture``; then kill the tree.

    Returns why it ended (``exit``, ``timeout``, ``memory``, ``processes`` or ``flood``), the wait status of
    ``pid`` and its peak memory in bytes. ``ended`` is called between its end and that of the tree. Raises
    ``ServerGone``.
    """
    end = _open_process(pid)
    try:
        reason = _wait(pid, end, tree, server, time.monotonic() + timeout, output, capture)
    finally:
        if end is not None:
            os.close(end)
    status, peak = int(signal.SIGKILL), 0
    if reason == "exit":
        _, status, used = os.wait4(pid, 0)
        peak = used.ru_maxrss * 1024
        ended()
    tree.kill()
    if capture is not None:
        _drain(output, capture)
        if capture.flooded:
            reason = "flood"
    return reason, status, peak


def _open_process(pid: int) -> int | None:
    """A descriptor that is readable when the process has ended; None where there is no such call (gVisor)."""
    try:
        return os.pidfd_open(pid)
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.EPERM):
            raise
        return None


def _has_ended(pid: int) -> bool:
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _wait(
    pid: int,
    ended: int | None,
    tree: Tree,
    server: Channel,
    deadline: float,
    output: int,
    capture: Capture | None,
) -> str:
    poll = select.poll()
    poll.register(server.fileno(), select.POLLIN)
    if ended is not None:
        poll.register(ended, select.POLLIN)
    if capture is not None:
        poll.register(output, select.POLLIN)
    longest = limits.WATCH_INTERVAL if ended is not None else _LOOK
    watch_at = time.monotonic() + limits.WATCH_INTERVAL
    while True:
        now = time.monotonic()
        if now >= deadline:
            return "timeout"
        if now >= watch_at:
            if excess := tree.excess():
                return excess
            watch_at = now + limits.WATCH_INTERVAL
        pause = min(longest, max(0.0, min(deadline, watch_at) - now))
        ready = {fd for fd, _ in poll.poll(pause * 1000 + 1)}
        if server.fileno() in ready:
            raise ServerGone
        if capture is not None and output in ready:
            data = os.read(output, 65536)
            capture.keep(data)
            if not data:
                poll.unregister(output)
            elif capture.flooded:
                return "flood"
        if ended in ready or (ended is None and _has_ended(pid)):
            return "exit"


def _drain(output: int, capture: Capture) -> None:
    """Read what dead writers left in the pipe."""
    os.set_blocking(output, False)
    deadline = time.monotonic() + _DRAIN
    while not capture.flooded and time.monotonic() < deadline:
        try:
            data = os.read(output, 65536)
        except BlockingIOError:
            time.sleep(0.001)
            continue
        if not data:
            return
        capture.keep(data)


class Capture:
    """The first and the last part of a stream of bytes."""

    def __init__(self, size: int, flood: int):
        self._half = size // 2
        self._flood = flood
        self._head = bytearray()
        self._tail = bytearray()
        self._total = 0

    @property
    def flooded(self) -> bool:
        """Whether there were more than ``flood`` bytes."""
        return self._total > self._flood

    def keep(self, data: bytes) -> None:
        """Take more bytes."""
        self._total += len(data)
        room = self._half - len(self._head)
        self._head += data[:room]
        self._tail += data[room:] if room > 0 else data
        if len(self._tail) > 2 * self._half:
            del self._tail[: -self._half]

    def result(self) -> tuple[bytes, int]:
        """What was kept, with a marker line for what was not, and the number of bytes left out."""
        tail = bytes(self._tail[-self._half :])
        left_out = self._total - len(self._head) - len(tail)
        if not left_out:
            return bytes(self._head) + tail, 0
        return bytes(self._head) + MARKER.format(left_out).encode() + tail, left_out
