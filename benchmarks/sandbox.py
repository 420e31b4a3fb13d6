"""Latency of every kind of sandbox that this machine has, beside plain ``docker run`` and ``docker exec``.

``--leaks N`` instead plays N short episodes on servers that are killed at random, and counts what is left.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hintloop.envs.sandbox.base import SandboxDead, SandboxProvider
from hintloop.envs.sandbox.providers import PROVIDERS, open_provider

FILES = {"solution.py": "def square(x):\n    return x * x\n"}
IMAGE = "hintloop-sandbox"
LABEL = "hintloop.sandbox.owner"
PLAIN = ["docker", "run", "--rm", "--network", "none"]
Times = dict[str, float]
_EPISODES = """
import sys
from hintloop.envs.sandbox.providers import open_provider
provider = open_provider(sys.argv[1], pool=2)
while True:
    box = provider.start({"a": "b"})
    box.exec("setsid sleep 100 & echo hi; head -c 1M /dev/zero > big", timeout=20)
    box.close()
    print("played", flush=True)
"""


def measure(action: Callable[[], object], rounds: int, between: Callable[[], object] = lambda: None) -> Times:
    """Median and 90th percentile of wall time, in milliseconds; ``between`` runs before each round, untimed."""
    times = []
    for _ in range(rounds):
        between()
        start = time.perf_counter()
        action()
        times.append((time.perf_counter() - start) * 1000)
    return summary(times)


def summary(times: list[float]) -> Times:
    """Median and 90th percentile of some milliseconds."""
    times = sorted(times)
    return {"p50_ms": statistics.median(times), "p90_ms": times[round(0.9 * (len(times) - 1))]}


def at_once(episode: Callable[[], object], count: int) -> Times:
    """``count`` episodes at once: each one's time, and that of all together."""

    def one(_: int) -> float:
        start = time.perf_counter()
        episode()
        return (time.perf_counter() - start) * 1000

    start = time.perf_counter()
    with ThreadPoolExecutor(count) as threads:
        times = list(threads.map(one, range(count)))
    return summary(times) | {"all_ms": (time.perf_counter() - start) * 1000}


def wait_for_pool(provider: Any, count: int) -> None:
    """Until the pool, if there is one, is full; with a deadline."""
    deadline = time.monotonic() + 60
    while hasattr(provider, "num_ready") and provider.num_ready() < count:
        if time.monotonic() > deadline:
            raise TimeoutError("the pool does not fill")
        time.sleep(0.02)


def episode_on(provider: SandboxProvider) -> None:
    """Start, one command, one call, close."""
    box = provider.start(FILES)
    box.exec("true", timeout=60)
    box.call_function("solution.py", "square", [[3]], timeout=60)
    box.close()


def measure_kind(kind: str, rounds: int) -> dict[str, Times]:
    """All numbers of one kind of sandbox."""
    results: dict[str, Times] = {}
    with contextlib.closing(open_provider(kind, pool=0)) as cold:
        boxes: list[Any] = []
        results["start, cold"] = measure(lambda: boxes.append(cold.start(FILES)), max(3, rounds // 10))
        results["close"] = measure(lambda: boxes.pop().close(), len(boxes))
    with contextlib.closing(open_provider(kind, pool=4)) as provider:
        wait_for_pool(provider, 4)
        started: list[Any] = []

        def settle() -> None:
            for box in started:
                box.close()
            started.clear()
            wait_for_pool(provider, 4)

        results["start, pool"] = measure(
            lambda: started.append(provider.start(FILES)), max(5, rounds // 10), settle
        )
        settle()
        box = provider.start(FILES)
        wait_for_pool(provider, 4)
        results["exec true"] = measure(lambda: box.exec("true", timeout=60), rounds)
        results["call_function"] = measure(
            lambda: box.call_function("solution.py", "square", [[3]], timeout=60), rounds
        )
        results["read"] = measure(lambda: box.read("solution.py"), rounds)
        results["write"] = measure(lambda: box.write("a.py", b"x" * 1000), rounds)
        results["fork"] = measure(lambda: started.append(box.fork()), 5, settle)
        settle()
        for count in (8, 32):
            results[f"{count} episodes at once"] = at_once(lambda: episode_on(provider), count)
            wait_for_pool(provider, 4)
        box.close()
    return results


def measure_plain(rounds: int) -> dict[str, Times]:
    """The same with the ``docker`` command: a container per episode, an ``exec`` per command."""

    def call(*command: str) -> str:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout.strip()

    def start() -> str:
        return call(*PLAIN, "--detach", IMAGE, "sleep", "600")

    def play() -> None:
        container = start()
        call("docker", "exec", container, "true")
        call("docker", "exec", container, "python3", "-c", "0")
        call("docker", "rm", "--force", container)

    box = start()
    results = {
        "docker run true": measure(lambda: call(*PLAIN, IMAGE, "true"), max(3, rounds // 10)),
        "docker exec true": measure(lambda: call("docker", "exec", box, "true"), max(5, rounds // 4)),
    }
    call("docker", "rm", "--force", box)
    for count in (8, 32):
        results[f"{count} episodes at once"] = at_once(play, count)
    return results


def own_processes() -> int:
    """Processes of the machine that a sandbox could have left."""
    found = 0
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/cmdline", "rb") as file:
            found += file.read().startswith(b"sleep\x00100\x00")
    return found


def count_leaks(kind: str, episodes: int) -> dict[str, int]:
    """Play on servers that are killed after a random number of episodes, and count what is left in the end.

    ``before``: what was left until a server was started again.
    """
    played = kills = 0
    with tempfile.TemporaryDirectory() as folder:
        env = {**os.environ, "TMPDIR": folder}
        while played < episodes:
            command = [sys.executable, "-c", _EPISODES, kind]
            with subprocess.Popen(command, stdout=subprocess.PIPE, env=env) as server:
                assert server.stdout is not None
                for _ in range(random.randint(1, 20)):
                    if not server.stdout.readline():
                        raise SandboxDead(f"a server of {kind} ended by itself")
                    played += 1
                time.sleep(random.random() * 0.3)
                server.kill()
                kills += 1
        before = settled(folder)
        open_provider(kind, pool=0).close()  # the next server removes what was being made at the last kill
        left = settled(folder)
    names = ("containers", "processes", "files")
    return {
        "episodes": played,
        "kills": kills,
        **dict(zip(names, left, strict=True)),
        **{f"{name} before": count for name, count in zip(names, before, strict=True)},
    }


def settled(folder: str) -> tuple[int, int, int]:
    """``leftovers``, when there are none or after a while."""
    deadline = time.monotonic() + 30
    while (left := leftovers(folder)) != (0, 0, 0) and time.monotonic() < deadline:
        time.sleep(0.5)
    return left


def leftovers(folder: str) -> tuple[int, int, int]:
    """Containers and processes of sandboxes on this machine, and files in ``folder``, which was that for such."""
    asked = ["docker", "ps", "--all", "--quiet", "--filter", f"label={LABEL}"]
    try:
        ids = subprocess.run(asked, capture_output=True, text=True, timeout=60, check=False).stdout.split()
    except FileNotFoundError:
        ids = []
    return len(ids), own_processes(), sum(1 for _ in Path(folder).rglob("*"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kinds", nargs="*", default=list(PROVIDERS), help="sandboxes to measure")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument(
        "--leaks", type=int, default=0, metavar="N", help="episodes to play on killed servers"
    )
    options = parser.parse_args()
    results: dict[str, Any] = {}
    for kind in options.kinds:
        try:
            if options.leaks:
                results[kind] = {"leaks": count_leaks(kind, options.leaks)}
            else:
                results[kind] = measure_kind(kind, options.rounds)
        except SandboxDead as error:
            print(f"{kind}: left out: {error}")
    if not options.leaks and any(kind.startswith("docker") for kind in results):
        results["docker run/exec"] = measure_plain(options.rounds)
    for kind, rows in results.items():
        print(kind)
        for name, numbers in rows.items():
            print(f"  {name:24}" + "  ".join(f"{key} {value:8.1f}" for key, value in numbers.items()))
    print(json.dumps(results))


if __name__ == "__main__":
    main()
