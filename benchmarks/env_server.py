"""What a tool call costs over the environment server: steps per second, CPU of the server and the client.

    python benchmarks/env_server.py [--sessions 32] [--seconds 5]

One server process and one client process. First ``read_file`` only, then whole episodes (reset, three reads
and a submission, with its grading). The CPU of the sandboxes themselves is not counted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from hintloop.envs.client import CodingEnvClient
from hintloop.envs.models import ToolCall
from hintloop.envs.pool import EnvPool
from hintloop.envs.registry import register_taskset
from hintloop.envs.sandbox.local import LocalProvider
from hintloop.envs.server import serve
from hintloop.envs.task import Case, FunctionTests, Task

PATH = "solution.py"
TEXT = "def double(x):\n    y = x\n    for _ in range(1):\n        y += x\n    return y\n"
READ = ToolCall(name="read_file", arguments={"path": PATH})
SUBMIT = ToolCall(name="submit")
NUM_READS = 3
_TICKS = os.sysconf("SC_CLK_TCK")


class Bench:
    """One task without an end."""

    name = "bench"
    description = "for this benchmark"

    def splits(self) -> dict[str, list[str]]:
        """The one task."""
        return {"all": ["bench/read"]}

    def get(self, task_id: str) -> Task:
        """The task, whatever the id."""
        cases = tuple(Case((x,), 2 * x) for x in range(8))
        tests = FunctionTests(PATH, "double", cases[:2], cases)
        return Task(task_id, "read", {PATH: TEXT}, tests, {PATH: TEXT}, max_turns=10**9)


def cpu_seconds(pid: int) -> float:
    """User and system time of a process, without its children."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


async def reads(client: CodingEnvClient, until: float) -> int:
    """One endless episode of ``read_file``. Returns the number of steps."""
    await client.reset(task_id="bench/read")
    count = 0
    while time.monotonic() < until:
        await client.step(READ)
        count += 1
    await client.step(SUBMIT)
    return count


async def episodes(client: CodingEnvClient, until: float) -> int:
    """Whole episodes. Returns their number."""
    count = 0
    while time.monotonic() < until:
        await client.reset(task_id="bench/read")
        for _ in range(NUM_READS):
            await client.step(READ)
        result = await client.step(SUBMIT)
        assert result.reward == 1.0, result
        count += 1
    return count


async def measure(
    pool: EnvPool,
    work: Callable[[CodingEnvClient, float], Awaitable[int]],
    sessions: int,
    seconds: float,
    server: int,
) -> dict[str, float]:
    """Run ``work`` in all sessions at once: number per second, and CPU milliseconds of each."""

    async def one(until: float) -> int:
        async with pool.session() as client:
            return await work(client, until)

    await asyncio.gather(*(one(0.0) for _ in range(sessions)))  # opens the sessions
    start, ours, theirs = time.monotonic(), time.process_time(), cpu_seconds(server)
    count = sum(await asyncio.gather(*(one(start + seconds) for _ in range(sessions))))
    wall = time.monotonic() - start
    return {
        "count": count,
        "per_second": round(count / wall, 1),
        "server_cpu_ms": round(1000 * (cpu_seconds(server) - theirs) / count, 3),
        "client_cpu_ms": round(1000 * (time.process_time() - ours) / count, 3),
    }


async def run(url: str, sessions: int, seconds: float, server: int) -> dict[str, dict[str, float]]:
    """Both measurements with one pool."""
    pool = EnvPool(url, size=sessions)
    results = {
        "read_file": await measure(pool, reads, sessions, seconds, server),
        "episode": await measure(pool, episodes, sessions, seconds, server),
    }
    await pool.close()
    return results


def main() -> None:
    """Start the server, measure, print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sessions", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        register_taskset("bench", Bench)
        serve(LocalProvider(), port=0, ready_file=options.serve)
        return
    with tempfile.TemporaryDirectory() as folder:
        ready = Path(folder) / "ready"
        server = subprocess.Popen([sys.executable, __file__, "--serve", str(ready)])
        try:
            deadline = time.monotonic() + 60
            while not ready.exists() and server.poll() is None and time.monotonic() < deadline:
                time.sleep(0.05)
            results = asyncio.run(
                run(ready.read_text().strip(), options.sessions, options.seconds, server.pid)
            )
        finally:
            server.terminate()
            server.wait(20)
    print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
