"""How the parts that all machines share grow: the rollout process, readers of a journal, the average of replicas.

    python benchmarks/scaling.py [--kinds rollout readers outer]

``rollout``: the real manager on 1 to 16 simulated engines, a process each, with slow environments that cost nothing:
episodes and turns per second by engines and episodes in flight, and what the rollout process itself takes of a
processor for a turn. ``readers``: 1 to 16 processes that each read the
whole of one journal. ``outer``: an average of all parameters by two replicas, by the size of the model: through
torchft's gloo process group, a folder, and an S3-compatible server on this machine. All of it shares this machine's
processors; prints one JSON object per measurement.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import multiprocessing
import os
import random
import resource
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import structlog
import torch
from parts import Weights, all_at, link_segments, open_pool, servers
from rollout_loop import GROUP, STUDENT, SlowEnvironment

from hintloop.agent.engine import Sampling
from hintloop.agent.episode import Player
from hintloop.agent.policy import load_renderer
from hintloop.learner.replicas.lighthouse import open_lighthouse
from hintloop.learner.replicas.store import ObjectStoreAllReduce
from hintloop.replay.journal import Journal
from hintloop.rollout.engines.sim_plan import Plan
from hintloop.rollout.loop_lag import LoopLag
from hintloop.rollout.manager import GroupRule, Manager
from hintloop.rollout.pacing import Pacer
from hintloop.rollout.status import Board

PROMPT_MS, TOKEN_MS, TOKENS = 100, 4, 48
SLOTS = 32
"""Turns that one engine samples at once."""
WARM_UP_S, MEASURED_S = 6.0, 12.0
SEGMENTS = 2_000
ROUNDS = 3
REPLICAS = 2
ROUND_S = 300.0


async def play(folder: Path, engines: int, in_flight: int) -> dict[str, Any]:
    """The manager for a while, on that many engines."""
    plan = Plan(
        prompt_ms=PROMPT_MS, token_ms=TOKEN_MS, stop_after=10**15, stream_interval=16, max_requests=SLOTS
    )
    chat, rng, board, lag, weights = (
        load_renderer(STUDENT),
        random.Random(0),
        Board(),
        LoopLag(),
        Weights(folder),
    )

    @contextlib.asynccontextmanager
    async def opened() -> AsyncIterator[SlowEnvironment]:
        yield SlowEnvironment(random.Random(rng.random()))

    with servers(folder, *[plan] * engines) as started:
        pool = open_pool([server.wait() for server in started], weights)
        made, version = weights.publish()
        await pool.load_weights(made, version)
        await all_at(pool, version)
        manager = Manager(
            player=Player(engine=pool, chat=chat, model="m", env="e", max_tokens=2000),
            sampling=Sampling(1.0, TOKENS),
            open_environment=opened,
            task_of=lambda index, attempt=0: f"t{index}",
            append=Journal(folder / "journal").writer("bench").append,
            pacer=Pacer(groups_per_step=1, max_staleness=10**9, journalled=0, version=0),
            rule=GroupRule(GROUP, in_flight, 3, 8, 60.0),
            board=board,
            metrics=folder / "metrics.jsonl",
        )
        beside = [asyncio.create_task(work) for work in (manager.run(set()), lag.run())]
        await asyncio.sleep(WARM_UP_S)
        before = board.episodes, pool.stats()["turns"], time.process_time(), time.monotonic()
        await asyncio.sleep(MEASURED_S)
        after = board.episodes, pool.stats()["turns"], time.process_time(), time.monotonic()
        for task in beside:
            task.cancel()
        await asyncio.gather(*beside, return_exceptions=True)
        await pool.close()
    episodes, turns, cpu, wall = (now - then for now, then in zip(after, before, strict=True))
    return {
        "episodes_per_s": round(episodes / wall, 2),
        "turns_per_s": round(turns / wall, 1),
        "cpu_ms_per_turn": round(1e3 * cpu / max(turns, 1), 2),
        "lag_p99_ms": lag.snapshot()["lag_p99_ms"],
        "peak_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
    }


def measure_rollout(engines: list[int], in_flight: list[int]) -> Iterator[dict[str, Any]]:
    """Many episodes on one engine after another, then many engines for more and more episodes."""
    sizes = [(count, max(in_flight)) for count in engines]
    sizes += [(max(engines), count) for count in in_flight if count != max(in_flight)]
    for count, episodes in sizes:
        with tempfile.TemporaryDirectory(prefix="hintloop-bench-") as folder:
            found = asyncio.run(play(Path(folder), count, episodes))
        yield {"engines": count, "in_flight": episodes, **found}


def read_all(uri: str, started: Any, took: Any) -> None:
    """One reader: the whole journal, from the beginning."""
    started.wait()
    before, reader = time.monotonic(), Journal(uri).reader()
    count = sum(1 for _ in iter(reader.poll_segment, None))
    took.put((count, time.monotonic() - before))


def measure_readers(counts: list[int]) -> Iterator[dict[str, Any]]:
    """Several readers at once, each with a position of its own."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory(prefix="hintloop-bench-") as folder:
        link_segments(Path(folder) / "journal", SEGMENTS)
        for count in counts:
            started, took = context.Event(), context.Queue()
            readers = [
                context.Process(target=read_all, args=(str(Path(folder) / "journal"), started, took))
                for _ in range(count)
            ]
            for reader in readers:
                reader.start()
            started.set()
            found = [took.get(timeout=ROUND_S) for _ in readers]
            for reader in readers:
                reader.join()
            assert {segments for segments, _ in found} == {SEGMENTS}
            slowest = max(seconds for _, seconds in found)
            yield {
                "readers": count,
                "segments_per_s_each": round(SEGMENTS / slowest),
                "segments_per_s_all": round(count * SEGMENTS / slowest),
            }


def average(index: int, places: dict[str, str], sizes: list[int], found: Any) -> None:
    """One replica: the average of that many parameters in each place, timed."""
    from hintloop.learner.replicas.live import ReplicaManager

    torch.set_num_threads(1)
    for size in sizes:
        tensors = list(torch.randn(size, generator=torch.Generator().manual_seed(index)).chunk(16))
        for place, uri in places.items():
            times = []
            if place == "gloo":
                manager = ReplicaManager(index, REPLICAS, uri, min_replicas=REPLICAS)
                for _ in range(ROUNDS):
                    before = time.monotonic()
                    manager.start_quorum()
                    for tensor in tensors:
                        manager.allreduce(tensor.clone()).wait()
                    assert manager.should_commit()
                    times.append(time.monotonic() - before)
                manager.shutdown()
            else:
                reduce = ObjectStoreAllReduce(
                    f"{uri}/{size}", index, REPLICAS, timeout_s=ROUND_S, poll_s=0.05
                )
                for number in range(ROUNDS):
                    before = time.monotonic()
                    reduce.average(number, tensors)
                    times.append(time.monotonic() - before)
            if index == 0:
                found.put((size, place, sorted(times)[ROUNDS // 2], max(times)))


@contextlib.contextmanager
def bucket() -> Iterator[str]:
    """A bucket of a server on loopback, which the usual variables of the environment name."""
    import s3fs
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server.start()
    host, port = server.get_host_and_port()
    os.environ |= {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "benchmark",
        "AWS_SECRET_ACCESS_KEY": "benchmark",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    s3fs.S3FileSystem().mkdir("rounds")
    s3fs.S3FileSystem.clear_instance_cache()
    yield "s3://rounds"
    server.stop()


def measure_outer(sizes: list[int]) -> Iterator[dict[str, Any]]:
    """Averages by processes that share this machine."""
    context = multiprocessing.get_context("spawn")
    with (
        tempfile.TemporaryDirectory(prefix="hintloop-bench-") as folder,
        bucket() as s3,
        contextlib.ExitStack() as on,
    ):
        places = {
            "gloo": on.enter_context(open_lighthouse(min_replicas=REPLICAS)),
            "file": f"file://{folder}",
            "s3": s3,
        }
        found = context.Queue()
        replicas = [
            context.Process(target=average, args=(index, places, sizes, found)) for index in range(REPLICAS)
        ]
        for replica in replicas:
            replica.start()
        for _ in range(len(sizes) * len(places)):
            size, place, median, most = found.get(timeout=ROUND_S)
            yield {
                "parameters": size,
                "place": place,
                "p50_s": round(median, 3),
                "max_s": round(most, 3),
                "mb_per_s": round(4e-6 * size / median),
            }
        for replica in replicas:
            replica.join()


def main() -> None:
    """Print one JSON line per measurement."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--kinds", nargs="+", default=["rollout", "readers", "outer"], choices=["rollout", "readers", "outer"]
    )
    parser.add_argument("--engines", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--in-flight", type=int, nargs="+", default=[16, 64, 256, 1000])
    parser.add_argument("--readers", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--parameters", type=int, nargs="+", default=[10**5, 10**6, 10**7, 10**8])
    options = parser.parse_args()
    os.environ["RUST_LOG"] = "error"  # torchft's
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    measures = {
        "rollout": lambda: measure_rollout(options.engines, options.in_flight),
        "readers": lambda: measure_readers(options.readers),
        "outer": lambda: measure_outer(options.parameters),
    }
    for kind in options.kinds:
        for found in measures[kind]():
            print(json.dumps({"kind": kind, **found}), flush=True)


if __name__ == "__main__":
    main()
