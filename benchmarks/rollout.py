"""What sampling through the engine pool costs, against simulated servers in processes of their own.

    python benchmarks/rollout.py [--rounds 8]

``overhead``: time of a turn through the pool beyond the time that the server took to sample it, by turns in flight;
``bare`` is the same for the least that a client can do (bytes over a socket, nothing parsed), so the difference
is what the pool costs.
``publish``: time to bring servers to a new version whose load takes no time, for each server.
``recovery``: after SIGKILL of one of two servers, the longest turn of those that were running, and the time until it,
started again at once, is back at a version that was published meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import structlog
from parts import STOP, Server, Weights, all_at, open_pool, servers

from hintloop.agent.engine import Sampling
from hintloop.rollout.engines.pool import Pool
from hintloop.rollout.engines.sim_plan import Plan
from hintloop.rollout.engines.vllm import GENERATE

TOKENS = (24, 72)
"""Range of the tokens of a turn."""
TURN_S = 0.2
PLAN = Plan(prompt_ms=100, token_ms=2, stop_after=10**15, stream_interval=16)
AT_ONCE = Plan()

Ask = Callable[[int, list[int], int], Awaitable[object]]
"""(number, prompt, tokens) -> when the turn is complete."""


def pooled(pool: Pool) -> Ask:
    """Through the pool."""

    async def ask(number: int, prompt: list[int], tokens: int) -> object:
        return await pool.generate(prompt, Sampling(1.0, tokens), session=str(number))

    return ask


def bare(url: str) -> Ask:
    """The same request over a kept connection; its answer is read and thrown away."""
    host, _, port = url.removeprefix("http://").rpartition(":")
    idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def ask(number: int, prompt: list[int], tokens: int) -> object:
        reader, writer = idle.pop() if idle else await asyncio.open_connection(host, int(port), limit=1 << 22)
        params = {"max_tokens": tokens, "stop_token_ids": [STOP], "logprobs": 0}
        body = {"request_id": str(number), "token_ids": prompt, "stream": True, "sampling_params": params}
        data = json.dumps(body).encode()
        head = f"POST {GENERATE} HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(data)}\r\n\r\n"
        writer.write(head.encode() + data)
        await reader.readuntil(b"\r\n0\r\n\r\n")
        idle.append((reader, writer))
        return None

    return ask


async def overhead(ask: Ask, url: str, in_flight: int, rounds: int) -> dict[str, float]:
    """Turns in a closed loop; each has a prompt length of its own, by which the server's time is found."""
    took: dict[int, float] = {}
    numbers = iter(range(in_flight * rounds))
    rng = random.Random(in_flight)

    async def work() -> None:
        await asyncio.sleep(rng.random() * TURN_S)  # turns of an episode do not begin all at once
        for number in numbers:
            prompt = [number % 900] * (100 + number)
            started = time.monotonic()
            await ask(number, prompt, rng.randint(*TOKENS))
            took[len(prompt)] = time.monotonic() - started

    started, cpu = time.monotonic(), time.process_time()
    await asyncio.gather(*(work() for _ in range(in_flight)))
    wall, cpu = time.monotonic() - started, time.process_time() - cpu
    shown = await asyncio.to_thread(httpx.get, f"{url}/sim")
    served = {entry["prompt"]: entry["seconds"] for entry in shown.json()["served"]}
    beyond = [1e3 * (seconds - served[prompt]) for prompt, seconds in took.items()]
    return {
        "turns_per_s": round(len(took) / wall, 1),
        "p50_ms": round(statistics.median(beyond), 2),
        "p95_ms": round(sorted(beyond)[int(0.95 * len(beyond))], 2),
        "cpu_ms_per_turn": round(1e3 * cpu / len(took), 2),
    }


async def publish(pool: Pool, weights: Weights, rounds: int) -> dict[str, float]:
    """Time of a roll-out, for each server."""
    took = []
    for _ in range(rounds):
        folder, version = weights.publish()
        started = time.monotonic()
        await pool.load_weights(folder, version)
        await all_at(pool, version)
        took.append(1e3 * (time.monotonic() - started) / len(pool.servers()))
    return {"p50_ms_per_server": round(statistics.median(took), 1), "max": round(max(took), 1)}


async def recovery(pool: Pool, weights: Weights, victim: Server, url: str) -> dict[str, float]:
    """Kill a server under load, start it again at once, publish meanwhile, and wait until it has that version."""

    async def turn(number: int) -> float:
        started = time.monotonic()
        await pool.generate([number] * 50, Sampling(1.0, 400), session=str(number))
        return time.monotonic() - started

    undisturbed = max(await asyncio.gather(*(turn(number) for number in range(16))))
    turns = [asyncio.create_task(turn(number)) for number in range(16)]
    await asyncio.sleep(0.5)
    os.kill(victim.process.pid, signal.SIGKILL)
    killed = time.monotonic()
    victim.process.wait(10)
    victim.start(int(url.rpartition(":")[2]))
    folder, version = weights.publish()
    await pool.load_weights(folder, version)
    await asyncio.to_thread(victim.wait)
    up = time.monotonic()
    await all_at(pool, version)
    now = time.monotonic()
    longest = max(await asyncio.gather(*turns))
    return {
        "longest_turn_s": round(longest, 2),
        "undisturbed_s": round(undisturbed, 2),
        "kill_to_back_s": round(now - killed, 2),
        "up_to_back_s": round(now - up, 2),
        "kept_tokens": pool.stats()["continued_tokens"],
    }


async def measure(folder: Path, in_flight: Sequence[int], rounds: int) -> None:
    """Everything, one line each."""
    weights = Weights(folder)

    def show(name: str, found: dict[str, Any]) -> None:
        print(json.dumps({"kind": name, **found}), flush=True)

    @contextlib.asynccontextmanager
    async def pool_on(*plans: Plan) -> AsyncIterator[tuple[Pool, list[Server], list[str]]]:
        with servers(folder, *plans) as started:
            urls = [server.wait() for server in started]
            made, version = weights.publish()
            pool = open_pool(urls, weights)
            await pool.load_weights(made, version)
            await all_at(pool, version)
            yield pool, started, urls
            await pool.close()

    async with pool_on(PLAN) as (pool, _, urls):
        for number in in_flight:
            for name, ask in (("overhead", pooled(pool)), ("bare", bare(urls[0]))):
                show(name, {"in_flight": number, **await overhead(ask, urls[0], number, rounds)})
    for count in (1, 4):
        async with pool_on(*[AT_ONCE] * count) as (pool, _, _):
            show("publish", {"servers": count, **await publish(pool, weights, rounds)})
    async with pool_on(PLAN, PLAN) as (pool, started, urls):
        show("recovery", await recovery(pool, weights, started[0], urls[0]))


def main() -> None:
    """Print one JSON line per measurement."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--in-flight", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--rounds", type=int, default=8, help="turns per place in flight; new versions")
    args = parser.parse_args()
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    with tempfile.TemporaryDirectory(prefix="hintloop-bench-") as folder:
        asyncio.run(measure(Path(folder), args.in_flight, args.rounds))


if __name__ == "__main__":
    main()
