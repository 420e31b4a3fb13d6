"""Shell commands in a runner: both outputs in one pipe, and nothing left running afterwards."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from hintloop.envs.sandbox import limits
from hintloop.envs.sandbox.processes import Capture, Tree, oom_kills, supervise
from hintloop.envs.sandbox.wire import Channel


def run_command(
    command: bytes,
    stdin: bytes,
    environment: dict[str, str],
    *,
    tree: Tree,
    server: Channel,
    timeout: float,
    grace: float | None,
) -> tuple[dict[str, Any], bytes]:
    """Run a shell command; the header says how it ended, the body is its output.

    ``left_running``: whether other processes were there ``grace`` seconds after its end; None does not look.
    """
    started, kills = time.monotonic(), oom_kills()
    read_end, write_end = os.pipe2(os.O_CLOEXEC)
    stdin_fd = _input(stdin)
    actions = [(os.POSIX_SPAWN_DUP2, stdin_fd, 0), (os.POSIX_SPAWN_DUP2, write_end, 1)]
    actions.append((os.POSIX_SPAWN_DUP2, write_end, 2))
    try:
        pid = os.posix_spawn(
            "/bin/sh",
            [b"sh", b"-c", command],
            environment,
            file_actions=actions,
            setsid=True,
            setsigdef=[signal.SIGPIPE, signal.SIGXFSZ],
        )
    except (OSError, ValueError) as error:
        os.close(read_end)
        return {
            "end": "exit",
            "code": 126,
            "left_out": 0,
            "seconds": 0.0,
            "left_running": False,
        }, f"cannot run: {error}\n".encode()
    finally:
        os.close(write_end)
        os.close(stdin_fd)
    capture = Capture(limits.OUTPUT, limits.OUTPUT_FLOOD)
    left_running = False

    def look() -> None:
        nonlocal left_running
        left_running = grace is not None and tree.outlives(pid, grace)

    try:
        end, status, peak = supervise(
            pid, tree=tree, server=server, timeout=timeout, output=read_end, capture=capture, ended=look
        )
    finally:
        os.close(read_end)
    output, left_out = capture.result()
    code = os.waitstatus_to_exitcode(status)
    if (
        end == "exit"
        and code != 0
        and (oom_kills() > kills or _out_of_memory(code, peak, output, tree.memory))
    ):
        end = "memory"
    header = {"end": end, "code": code if code >= 0 else 128 - code, "left_out": left_out}
    return header | {"seconds": time.monotonic() - started, "left_running": left_running}, output


def _input(data: bytes) -> int:
    if not data:
        return os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
    fd = os.memfd_create("stdin", os.MFD_CLOEXEC)
    with os.fdopen(os.dup(fd), "wb") as file:
        file.write(data)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def _out_of_memory(code: int, peak: int, output: bytes, memory: int) -> bool:
    """Allocation failed (the address space limit), or the kernel killed a process that had become large."""
    if code == -signal.SIGKILL:
        return peak > memory // 2
    last = output.rstrip().rpartition(b"\n")[2]
    return last.startswith(b"MemoryError") or b"annot allocate memory" in last or b"ut of memory" in last
