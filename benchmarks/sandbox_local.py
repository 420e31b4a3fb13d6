"""Latency and CPU time of the local sandbox, against starting a Python process.

CPU time is that of this process, the zygote and everything below them; "system" is the busy time of the
whole machine over the same rounds, which also has the kernel's own clean-up in it (and whatever else runs).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

from hintloop.envs.sandbox.local import LocalProvider

SOURCE = "def square(x):\n    return x * x\n"


def measure(action: Callable[[], object], rounds: int) -> dict[str, float]:
    """Median and 90th percentile of wall time, in milliseconds."""
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        action()
        times.append((time.perf_counter() - start) * 1000)
    times.sort()
    return {"median_ms": statistics.median(times), "p90_ms": times[int(0.9 * (len(times) - 1))]}


def cpu_of(provider: LocalProvider) -> float:
    """CPU milliseconds of this process and of the zygote with all its finished children."""
    own = os.times()
    pid = provider.zygote_pid
    with open(f"/proc/{pid}/stat", encoding="ascii") as file:
        fields = file.read().rpartition(")")[2].split()
    zygote = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    return 1000 * (own.user + own.system + zygote)


def busy() -> float:
    """Busy CPU milliseconds of the machine so far."""
    with open("/proc/stat", encoding="ascii") as file:
        user, nice, system, _, _, irq, softirq, *_ = map(int, file.readline().split()[1:])
    return 1000 * (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def start_and_close(provider: LocalProvider, rounds: int) -> dict[str, float]:
    """Wall and CPU time of one sandbox that does nothing."""
    cpu, machine = cpu_of(provider), busy()
    result = measure(lambda: provider.start({"solution.py": SOURCE}).close(), rounds)
    time.sleep(0.3)
    result["cpu_ms"] = (cpu_of(provider) - cpu) / rounds
    result["system_ms"] = (busy() - machine) / rounds
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    rounds = parser.parse_args().rounds
    with LocalProvider() as provider:
        results = {"start + close": start_and_close(provider, rounds)}
        sandbox = provider.start({"solution.py": SOURCE})
        calls = [[n] for n in range(6)]
        results |= {
            "call_function (6 calls)": measure(
                lambda: sandbox.call_function("solution.py", "square", calls, timeout=5), rounds
            ),
            "exec true": measure(lambda: sandbox.exec("true", timeout=5), rounds),
            "exec python -c 0": measure(lambda: sandbox.exec("python -I -S -c 0", timeout=5), rounds // 4),
            "read": measure(lambda: sandbox.read("solution.py"), rounds),
            "write": measure(lambda: sandbox.write("solution.py", SOURCE.encode()), rounds),
        }
        print(f"isolation: {provider.isolation}, {rounds} rounds")
    command = [sys.executable, "-I", "-S", "-B", "-c", "0"]
    results["subprocess python -I -S -B"] = measure(lambda: subprocess.run(command, check=True), rounds // 4)
    for name, numbers in results.items():
        print(f"{name:28}" + "  ".join(f"{key} {value:7.2f}" for key, value in numbers.items()))
    print(json.dumps(results))


if __name__ == "__main__":
    main()
