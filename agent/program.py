"""An agent program as a process: what it is told, what is kept of what it prints, and that all of it ends.

It gets none of this process's environment but the search path: no key that is at hand here is at hand there. Its
folder is its own, and gone after it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from hintloop.agent import guard, sandbox_command

COMMAND = "hintloop-sandbox"
TAIL_BYTES = 4096
"""Of what a program prints, the end is kept."""
GRACE_S = 2.0
"""How long a program may go on when its episode is over."""
TASK_FILE = "TASK.md"
MAX_VARIABLE_BYTES = 100_000
"""The kernel takes no longer texts in an environment; the whole task is in the file."""
_LOOK_S = 1.0
_END_S = 10.0


@dataclass(frozen=True, slots=True)
class Ended:
    """How a program ended."""

    status: int | None
    """Its exit status, 128 and more for a signal; None: it was killed because the episode was over."""
    output: str
    """The end of what it printed."""


class Hung(Exception):
    """A program did nothing for too long."""


@contextlib.contextmanager
def commands() -> Iterator[Path]:
    """A folder with the command ``hintloop-sandbox``, for the search path of programs."""
    with tempfile.TemporaryDirectory(prefix="hintloop-bin-") as name:
        script = Path(name) / COMMAND
        script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -I -S "{sandbox_command.__file__}" "$@"\n')
        script.chmod(0o755)
        yield Path(name)


def variables(*, url: str, token: str, model: str, task_id: str, instruction: str) -> dict[str, str]:
    """What a program is told: where the model and the sandbox are, and its task."""
    told = {
        "OPENAI_BASE_URL": f"{url}/v1",
        "OPENAI_API_BASE": f"{url}/v1",
        "OPENAI_API_KEY": token,
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": token,
        "HINTLOOP_SANDBOX_URL": f"{url}/sandbox",
        "HINTLOOP_TOKEN": token,
        "HINTLOOP_MODEL": model,
        "HINTLOOP_TASK_ID": task_id,
        "NO_PROXY": "127.0.0.1",
        "no_proxy": "127.0.0.1",
    }
    if len(instruction.encode()) <= MAX_VARIABLE_BYTES and "\0" not in instruction:
        told["HINTLOOP_TASK"] = instruction
    return told


async def run(
    command: str,
    told: Mapping[str, str],
    *,
    bin_folder: Path,
    instruction: str,
    over: asyncio.Event,
    waited: Callable[[], float],
    idle_s: float,
) -> Ended:
    """Run a shell command line until it ends, or until shortly after ``over``; nothing of it runs on.

    Raises ``Hung`` when it takes more than ``idle_s`` seconds of its own: what it ``waited`` for others is not counted.
    """
    async with _home(instruction) as folder:
        environment = {
            "PATH": f"{bin_folder}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
            "SHELL": str(bin_folder / COMMAND),
            "HOME": folder,
            "TMPDIR": folder,
            "LANG": "C.UTF-8",
            "HINTLOOP_TASK_FILE": str(Path(folder, TASK_FILE)),
            **told,
        }
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", guard.__file__, "/bin/sh", "-c", command),
                stdin=theirs.fileno(),
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                env=environment,
                cwd=folder,
                start_new_session=True,
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        return await _watch(process, ours, over, waited, idle_s)


@contextlib.asynccontextmanager
async def _home(instruction: str) -> AsyncIterator[str]:
    """A program's folder with its task. It may come to hold very many files, so a thread removes it."""
    made = tempfile.TemporaryDirectory(prefix="hintloop-agent-", ignore_cleanup_errors=True)
    try:
        await asyncio.to_thread(_write, Path(made.name, TASK_FILE), instruction)
        yield made.name
    finally:
        await asyncio.shield(asyncio.to_thread(made.cleanup))  # goes on when this is cancelled


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8", errors="replace")


async def _watch(
    process: asyncio.subprocess.Process,
    channel: socket.socket,
    over: asyncio.Event,
    waited: Callable[[], float],
    idle_s: float,
) -> Ended:
    assert process.stdout is not None
    kept = bytearray()
    ended = asyncio.create_task(asyncio.get_running_loop().sock_recv(channel, 16))
    overtime = asyncio.create_task(over.wait())
    reading = asyncio.create_task(_keep_tail(process.stdout, kept))
    try:
        await _until(ended, overtime, waited, idle_s)
        status = ended.result() if ended.done() else b""
    finally:
        for task in (ended, overtime):
            task.cancel()
        await asyncio.gather(ended, overtime, return_exceptions=True)
        channel.close()  # the guard then kills the group
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        await asyncio.wait_for(process.wait(), _END_S)
        await asyncio.wait({reading}, timeout=_LOOK_S)  # what left the group may hold the pipe open
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
    text = kept.decode(errors="replace")
    if over.is_set() and not status:
        return Ended(None, text)
    return Ended(int(status) if status else 128 + signal.SIGKILL, text)


async def _until(
    ended: asyncio.Task[bytes], overtime: asyncio.Task[bool], waited: Callable[[], float], idle_s: float
) -> None:
    """Until the program ended, or until it had its time when the episode was over. Raises ``Hung``."""
    started, before = time.monotonic(), waited()
    while not ended.done() and not overtime.done():
        left = idle_s - (time.monotonic() - started - (waited() - before))
        if left <= 0:
            raise Hung(f"it took more than {idle_s:g} s beside its calls")
        await asyncio.wait({ended, overtime}, timeout=min(left, _LOOK_S), return_when=asyncio.FIRST_COMPLETED)
    if not ended.done():
        await asyncio.wait({ended}, timeout=GRACE_S)


async def _keep_tail(stream: asyncio.StreamReader, kept: bytearray) -> None:
    while part := await stream.read(65536):
        kept += part
        del kept[:-TAIL_BYTES]
