"""What several benchmarks use: simulated engines as processes, tiny weights, and a journal of many files."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from hintloop.replay.episode import NOT_SAMPLED, Episode, HintSite, Outcome, Turn
from hintloop.replay.segment import encode
from hintloop.replay.weights import WeightStore
from hintloop.rollout.engines.pool import Pool
from hintloop.rollout.engines.sim_plan import Plan
from hintloop.rollout.engines.vllm import Patience
from hintloop.rollout.vllm_extension import CACHE

STOP = 999
START_S = 60.0
WRITERS = 16
DIFFERENT = 64
"""Segments that differ; more are links to these."""
TOKENS = 600
WORDS = ["def", "return", "value", "=", "self", "token", "path", "for", "in", "if", "not", "import", "class", "the",
         "of", "to", "line", "print", "(", ")", ":", "[", "]", "{", "}", "\\n"]  # fmt: skip


class Server:
    """``hintloop sim-engine`` in a process, which may be killed and started again on its port."""

    def __init__(self, folder: Path, name: str, plan: Plan) -> None:
        self._folder, self._ready, self._plan = folder, folder / f"{name}.url", folder / f"{name}.json"
        self._plan.write_text(plan.model_dump_json())
        self.start(0)

    def start(self, port: int) -> None:
        """Start the process; ``wait`` waits for it."""
        options = ["--port", str(port), "--plan", str(self._plan)]
        command = [sys.executable, "-m", "hintloop.cli.main", "sim-engine", *options]
        self._ready.unlink(missing_ok=True)
        self.process = subprocess.Popen(
            [*command, "--ready-file", str(self._ready)],
            env={**os.environ, CACHE: str(self._folder / "servers")},
        )

    def wait(self) -> str:
        """The URL, once it answers."""
        deadline = time.monotonic() + START_S
        while not self._ready.exists():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("a simulated server did not start")
            time.sleep(0.01)
        return self._ready.read_text().strip()


@contextlib.contextmanager
def servers(folder: Path, *plans: Plan) -> Iterator[list[Server]]:
    """Simulated servers, ended at the end."""
    started = [Server(folder, f"server{number}", plan) for number, plan in enumerate(plans)]
    try:
        yield started
    finally:
        for server in started:
            server.process.kill()
            server.process.wait(10)


class Weights:
    """A weight store with tiny versions."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.version = folder, -1
        self.store = WeightStore(folder / "weights")

    def publish(self) -> tuple[Path, int]:
        """The next version: its folder and its number."""
        self.version += 1
        made = self.folder / "made"
        made.mkdir(exist_ok=True)
        save_file({"weight": np.full((64, 64), self.version, np.float32)}, made / "model.safetensors")
        probe = {"token_ids": [1, 2, 3], "logprobs": [-1.0 - self.version, -2.0]}
        self.store.publish(self.version, made, metadata={"probe": probe})
        return self.store.fetch(self.version, self.folder / "cache"), self.version


def open_pool(urls: Sequence[str], weights: Weights) -> Pool:
    """A pool on the servers."""
    return Pool(urls, weights_uri=weights.store.uri, stop_ids=[STOP], patience=Patience(poll=0.5))


async def all_at(pool: Pool, version: int) -> None:
    """Wait until every server samples from a version."""
    async with asyncio.timeout(START_S):
        while any(server["version"] != version for server in pool.servers()):  # noqa: ASYNC110
            await asyncio.sleep(0.002)


def episode(number: int) -> Episode:
    """One like those of the bundled tasks: some turns, an error with its hint, no two alike."""
    rng = random.Random(number)
    turns = []
    for turn in range(6):
        text = " ".join(rng.choices(WORDS, k=40))
        role, tool = ("assistant", "run") if turn % 2 else ("tool", None)
        turns.append(Turn(role, 100 * turn, 100 * turn + 100, text, tool_name=tool))
    sampled = [token // 100 % 2 for token in range(TOKENS)]
    return Episode(
        episode_id=f"e{number}",
        group_id=f"g{number}",
        task_id=f"bugfix/{number}",
        env="coding",
        source="rollout",
        created_at=float(number),
        model="student",
        tokenizer_fingerprint="benchmark",
        token_ids=[rng.randrange(4096) for _ in range(TOKENS)],
        loss_mask=sampled,
        logprobs=[-rng.random() if each else 0.0 for each in sampled],
        policy_versions=[number // 64 if each else NOT_SAMPLED for each in sampled],
        turns=tuple(turns),
        outcome=Outcome.SOLVED,
        reward=1.0,
        hint_sites=(HintSite(3, "syntax_error", "mind the colon", 290, 300, 400, tuple(range(20))),),
    )


def link_segments(folder: Path, count: int) -> None:
    """A journal of many segments that nobody has merged yet, which are some few again and again."""
    folder.mkdir()
    blobs = [folder.parent / f"blob{number}" for number in range(DIFFERENT)]
    for number, blob in enumerate(blobs):
        blob.write_bytes(encode([episode(number)]))
    for number in range(count):
        os.link(blobs[number % DIFFERENT], folder / f"w{number % WRITERS}-{number // WRITERS:08d}.parquet")
