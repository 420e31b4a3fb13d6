"""What the manager adds to each request: from an engine's answer to the next question of the same episode.

    python benchmarks/rollout_manager.py [--in-flight 1 8 32 128]

Whole episodes through the real manager, player, tokenizer and journal; the engine takes ``TURN_S`` for each turn and no
processor time, the environment answers at once. Between two turns lie parsing the call, the environment's step, the
tokens of its result and the books; ``beyond_ms`` are median and 90th percentile of that.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import structlog
from rollout_loop import READ, STUDENT, SUBMIT, SlowEnvironment

from hintloop.agent.engine import Sample, Sampling
from hintloop.agent.episode import Player
from hintloop.agent.policy import load_renderer
from hintloop.envs.client import StepResult, step_result
from hintloop.envs.models import ToolCall, ToolResult
from hintloop.replay.journal import Journal
from hintloop.rollout.engines.scripted import ScriptedEngine
from hintloop.rollout.loop_lag import LoopLag
from hintloop.rollout.manager import GroupRule, Manager
from hintloop.rollout.pacing import Pacer
from hintloop.rollout.status import Board

TURNS, TURN_S = 8, 0.2
GROUP = 8


class Timed(ScriptedEngine):
    """Notes how long each episode took from an answer to its next question, in seconds."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.between: list[float] = []
        self._answered: dict[str, float] = {}

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, *, session: str) -> Sample:
        """As its parent."""
        if (since := self._answered.pop(session, None)) is not None:
            self.between.append(time.perf_counter() - since)
        sample = await super().generate(prompt_ids, sampling, session=session)
        self._answered[session] = time.perf_counter()
        return sample


class Environment(SlowEnvironment):
    """Answers at once."""

    async def step(self, action: ToolCall) -> StepResult[ToolResult]:
        """As its parent, which takes its time."""
        if action.name == "submit":
            return step_result(ToolResult(output="submitted", done=True, reward=1.0))
        return step_result(ToolResult(output="1: x = 1"))


async def measure(in_flight: int, seconds: float) -> dict[str, Any]:
    """Episodes for so long."""
    chat = load_renderer(STUDENT)
    engine = Timed(
        chat.tokenizer,
        lambda session, turn: SUBMIT if turn == TURNS - 1 else READ,
        stop_id=chat.renderer.get_stop_token_ids()[0],
        seconds_per_turn=TURN_S,
    )
    board, lag = Board(), LoopLag()

    @contextlib.asynccontextmanager
    async def opened() -> AsyncIterator[Environment]:
        yield Environment(None)  # type: ignore[arg-type]

    with tempfile.TemporaryDirectory(prefix="hintloop-bench-") as folder:
        manager = Manager(
            player=Player(engine=engine, chat=chat, model="m", env="e", max_tokens=4000),
            sampling=Sampling(1.0, 96),
            open_environment=opened,
            task_of=lambda index, attempt=0: f"t{index}",
            append=Journal(Path(folder) / "journal").writer("bench").append,
            pacer=Pacer(groups_per_step=1, max_staleness=10**9, journalled=0, version=0),
            rule=GroupRule(GROUP, in_flight, 3, 8, 60.0),
            board=board,
            metrics=Path(folder) / "metrics.jsonl",
        )
        beside = [asyncio.create_task(work) for work in (manager.run(set()), lag.run())]
        await asyncio.sleep(seconds)
        for task in beside:
            task.cancel()
        await asyncio.gather(*beside, return_exceptions=True)
    steps = statistics.quantiles(engine.between, n=10)
    return {
        "in_flight": in_flight,
        "turns": len(engine.between),
        "beyond_ms": [round(1e3 * steps[at], 2) for at in (4, 8)],
        "lag_p99_ms": lag.snapshot()["lag_p99_ms"],
    }


def main() -> None:
    """Print one JSON line per number of episodes in flight."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--in-flight", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--seconds", type=float, default=15.0)
    args = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    for in_flight in args.in_flight:
        found = asyncio.run(measure(in_flight, args.seconds))
        print(json.dumps({"kind": "manager", **found}), flush=True)


if __name__ == "__main__":
    main()
