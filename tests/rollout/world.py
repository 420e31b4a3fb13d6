"""Published weights, simulated servers in this process, and a pool of them; what they must sample can be computed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from hintloop.agent.engine import Sample, Sampling
from hintloop.replay.weights import WeightStore
from hintloop.rollout.engines.pool import Pool
from hintloop.rollout.engines.publish import Fetch, Way
from hintloop.rollout.engines.publish_adapter import FOLDER
from hintloop.rollout.engines.sim import SimEngine
from hintloop.rollout.engines.sim_model import SimModel, context_of, fold
from hintloop.rollout.engines.sim_plan import Fault, Plan
from hintloop.rollout.engines.sim_server import in_thread
from hintloop.rollout.engines.vllm import Patience

STOP = 99
PROMPT = [3, 1, 4, 1, 5]
GREEDY = 0.0
DEADLINE_S = 120.0
"""For a whole test, the start of a process included; only one that hangs needs it."""
VOCABULARY = 90
QUICK = Patience(
    turn=60.0,
    first=5.0,
    stall=5.0,
    connect=5.0,
    control=10.0,
    load=20.0,
    fetch=30.0,
    lag=10.0,
    join=60.0,
    poll=0.02,
)
"""Looks often, and waits as long as a busy machine may need: its servers share one interpreter with the test."""
IMPATIENT = replace(QUICK, first=0.5, stall=0.5)
"""For servers that hang."""
QUICK_MS, SLOW_MS = 2, 50
"""For a token."""
NEVER_STOPS = Plan(stop_after=10**15, token_ms=QUICK_MS, stream_interval=4, vocabulary=VOCABULARY)


def planned(*faults: Fault, **changes: Any) -> Plan:
    return NEVER_STOPS.model_copy(update={"fault": faults, **changes})


@dataclass
class World:
    """Published weights, servers in this process, and a pool of them."""

    folder: Path
    engines: list[SimEngine] = field(default_factory=list)
    urls: list[str] = field(default_factory=list)
    models: dict[int, SimModel] = field(default_factory=dict)
    way: type[Way] = Fetch

    def __post_init__(self) -> None:
        self.store = WeightStore(self.folder / "weights")

    def publish(self, version: int, *, scale: float = 1.0) -> None:
        made = self.folder / "made"
        (made / FOLDER).mkdir(parents=True, exist_ok=True)
        tensors = {"weight": np.full((8, 8), scale * (1 + version), np.float32)}
        save_file(tensors, made / "model.safetensors")
        save_file(tensors, made / FOLDER / "adapter_model.safetensors")
        (made / FOLDER / "adapter_config.json").write_text("{}")
        (made / "config.json").write_text(json.dumps({"vocab_size": VOCABULARY}))
        probe = {"token_ids": [1, 2, 3], "logprobs": [-1.0 - version, -2.0]}
        self.store.publish(version, made, metadata={"probe": probe})
        under = FOLDER if self.way.by_name else ""
        folder = self.store.fetch(version, self.folder / "models", under=under)
        self.models[version] = SimModel.of(folder, vocabulary=VOCABULARY)

    def fetched(self, version: int) -> Path:
        return self.store.fetch(version, self.folder / "cache")

    @contextlib.asynccontextmanager
    async def pool(
        self, *plans: Plan, patience: Patience = QUICK, roster: Path | None = None, load: bool = True
    ) -> AsyncIterator[Pool]:
        """A pool at version 0 on a server for each plan; everything within a deadline."""
        with contextlib.ExitStack() as stack:
            for plan in plans:
                engine = SimEngine(plan, cache=self.folder / f"server{len(self.engines)}")
                self.engines.append(engine)
                self.urls.append(stack.enter_context(in_thread(engine)))
            pool = self.another(patience=patience, roster=roster)
            try:
                async with asyncio.timeout(DEADLINE_S):
                    if load:
                        self.publish(0)
                        await pool.load_weights(self.fetched(0), 0)
                    yield pool
            finally:
                await pool.close()

    def another(self, *, patience: Patience = QUICK, roster: Path | None = None) -> Pool:
        """A pool on the servers that there are."""
        return Pool(
            self.urls,
            weights_uri=self.store.uri,
            stop_ids=[STOP],
            patience=patience,
            roster=roster,
            way=self.way(),
        )

    async def under_way(self, count: int) -> None:
        """Wait until so many requests are in the middle of their answers."""

        def begun() -> int:
            answers = [answer for engine in self.engines for answer in list(engine.running.values())]
            return sum(bool(answer.token_ids) for answer in answers)

        await until(lambda: begun() >= count)

    def hurry(self) -> None:
        """Let servers that were slow, so that something could happen meanwhile, be quick."""
        for engine in self.engines:
            engine.plan = engine.plan.model_copy(update={"token_ms": QUICK_MS})

    def greedy(self, count: int, version: int = 0) -> tuple[int, ...]:
        """What greedy sampling of the prompt gives when nothing goes wrong."""
        context = context_of(PROMPT)
        ids: list[int] = []
        while len(ids) < count and STOP not in ids:
            ids.append(self.models[version].draw(context, 0, [STOP], NEVER_STOPS.stop_after))
            context = fold(context, ids[-1])
        return tuple(ids)

    def check(self, sample: Sample) -> None:
        """Each recorded log-probability is that of its token, in its context, under its version."""
        context = context_of(PROMPT)
        for token, logprob, version in zip(
            sample.token_ids, sample.logprobs, sample.policy_versions, strict=True
        ):
            assert logprob == self.models[version].logprob(context, token)
            context = fold(context, token)


async def sample(pool: Pool, count: int, *, session: str = "s", temperature: float = GREEDY) -> Sample:
    return await pool.generate(PROMPT, Sampling(temperature, count), session=session)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - what is waited for happens in another thread or process
        await asyncio.sleep(0.01)


async def all_ready(pool: Pool, version: int) -> None:
    await until(
        lambda: {(server["state"], server["version"]) for server in pool.servers()} == {("ready", version)}
    )


async def looked_at(pool: Pool) -> None:
    """Wait until the pool has seen anew that each of its servers has the version that it was given."""
    now = time.monotonic()
    await until(lambda: all(each.server.standing.confirmed_at > now for each in pool._members.values()))
