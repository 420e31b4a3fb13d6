"""How long a learner waits for episodes when environments are slow, and what the manager throws away.

    python benchmarks/rollout_loop.py [--staleness 1 2 4]

The real manager, pacing and journal; an engine and environments that take their time and no CPU, and a learner that
takes each step's groups from the journal, is busy for a fixed time and says that its version is loaded. Steps of
environments take lognormal times, so a few are very slow, and one in 500 loses its environment. Generation could keep
up: with all places taken it makes ``spare`` times the episodes that the learner takes. ``idle``: share of the learner's
time without groups, after the warm-up. ``discards``: share of the finished episodes that never got into the journal.
``reading``: its time for the journal's files. ``lag``: versions between an episode's first weights and the step that
took it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import math
import random
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog

from hintloop.agent.engine import Sampling
from hintloop.agent.episode import Player
from hintloop.agent.policy import load_renderer
from hintloop.agent.student import build
from hintloop.envs.client import EnvironmentLost, StepResult, step_result
from hintloop.envs.models import TaskInfo, ToolCall, ToolResult
from hintloop.envs.tools import TOOL_PROMPT, TOOLS
from hintloop.replay.journal import Journal
from hintloop.rollout.engines.scripted import ScriptedEngine
from hintloop.rollout.loop_lag import LoopLag
from hintloop.rollout.manager import GroupRule, Manager
from hintloop.rollout.pacing import Pacer
from hintloop.rollout.status import Board

STUDENT = Path(build.__file__).parent / "student-tiny"
TURNS = 4
GROUP, PER_STEP = 8, 4
STEP_MEAN_S, STEP_SIGMA, TURN_S = 0.25, 1.0, 0.05
LOST = 1 / 500
READ = '<tool_call>\n{"name": "read_file", "arguments": {"path": "solution.py"}}\n</tool_call>'
SUBMIT = '<tool_call>\n{"name": "submit", "arguments": {}}\n</tool_call>'


class SlowEnvironment:
    """Each step takes a lognormal time; submitting ends the episode with a random reward."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    async def reset(self, **kwargs: Any) -> StepResult[ToolResult]:
        task = TaskInfo(
            task_id=kwargs["task_id"],
            instruction="Fix solution.py",
            files=["solution.py"],
            tools=list(TOOLS.values()),
            tool_prompt=TOOL_PROMPT,
            max_turns=8,
        )
        return step_result(ToolResult(task=task))

    async def step(self, action: ToolCall) -> StepResult[ToolResult]:
        mu = math.log(STEP_MEAN_S) - STEP_SIGMA**2 / 2
        await asyncio.sleep(self._rng.lognormvariate(mu, STEP_SIGMA))
        if self._rng.random() < LOST:
            raise EnvironmentLost("the socket was closed")
        if action.name == "submit":
            return step_result(
                ToolResult(output="submitted", done=True, reward=float(self._rng.random() < 0.5))
            )
        return step_result(ToolResult(output="1: x = 1"))


@dataclass
class Learned:
    """What the stand-in for the learner saw after the warm-up."""

    busy_s: float = 0.0
    reading_s: float = 0.0
    idle_s: float = 0.0
    lags: list[int] = field(default_factory=list)


async def learn(
    journal: Journal, pacer: Pacer, engine: ScriptedEngine, warm_up: int, steps: int, step_s: float
) -> Learned:
    """Take groups in the order of the journal, as the learner does."""
    reader, found = journal.reader(), Learned()
    waiting: list[int] = []
    for step in range(warm_up + steps):
        idle_s = reading_s = 0.0
        while len(waiting) < PER_STEP:
            started = time.monotonic()
            segment = await asyncio.to_thread(reader.poll_segment)
            if segment is None:
                await asyncio.sleep(0.02)
                idle_s += time.monotonic() - started
                continue
            reading_s += time.monotonic() - started
            waiting.append(min(v for each in segment.episodes for v in each.policy_versions if v >= 0))
        taken, waiting = waiting[:PER_STEP], waiting[PER_STEP:]
        if step >= warm_up:
            found.idle_s += idle_s
            found.reading_s += reading_s
            found.busy_s += step_s
            found.lags += [step - version for version in taken]
        await asyncio.sleep(step_s)
        engine.version = step + 1
        pacer.loaded(step + 1)
    return found


async def measure(staleness: int, warm_up: int, steps: int, step_s: float, spare: float) -> dict[str, Any]:
    """One run."""
    chat = load_renderer(STUDENT)
    stop = chat.renderer.get_stop_token_ids()[0]
    engine = ScriptedEngine(
        chat.tokenizer,
        lambda session, turn: SUBMIT if turn == TURNS - 1 else READ,
        stop_id=stop,
        seconds_per_turn=TURN_S,
    )
    in_flight = round(spare * GROUP * PER_STEP / step_s * TURNS * (STEP_MEAN_S + TURN_S))
    rng, board, lag = random.Random(0), Board(), LoopLag()

    @contextlib.asynccontextmanager
    async def opened() -> AsyncIterator[SlowEnvironment]:
        yield SlowEnvironment(random.Random(rng.random()))

    with tempfile.TemporaryDirectory(prefix="hintloop-bench-") as folder:
        journal = Journal(Path(folder) / "journal")
        pacer = Pacer(groups_per_step=PER_STEP, max_staleness=staleness, journalled=0, version=0)
        manager = Manager(
            player=Player(engine=engine, chat=chat, model="m", env="e", max_tokens=2000),
            sampling=Sampling(1.0, 96),
            open_environment=opened,
            task_of=lambda index, attempt=0: f"t{index}",
            append=journal.writer("bench").append,
            pacer=pacer,
            rule=GroupRule(GROUP, in_flight, 3, 8, 60.0),
            board=board,
            metrics=Path(folder) / "metrics.jsonl",
        )
        beside = [asyncio.create_task(work) for work in (manager.run(set()), lag.run())]
        learned = await learn(journal, pacer, engine, warm_up, steps, step_s)
        while pacer.journalled < pacer.limit:  # what has started ends # noqa: ASYNC110
            await asyncio.sleep(0.05)
        for task in beside:
            task.cancel()
        await asyncio.gather(*beside, return_exceptions=True)
    whole = learned.idle_s + learned.reading_s + learned.busy_s
    return {
        "max_staleness": staleness,
        "in_flight": in_flight,
        "idle": round(learned.idle_s / whole, 3),
        "reading": round(learned.reading_s / whole, 3),
        "discards": round(1 - GROUP * pacer.journalled / board.episodes, 4),
        "replaced": board.lost.total(),
        "lag_mean": round(sum(learned.lags) / len(learned.lags), 2),
        "lag_max": max(learned.lags),
        "loop": lag.snapshot(),
    }


def main() -> None:
    """Print one JSON line per bound on the lag."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--staleness", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--warm-up", type=int, default=8, help="steps that are not counted")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--step-s", type=float, default=2.0, help="how long the learner is busy with a step")
    parser.add_argument("--spare", type=float, default=2.0)
    args = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    for staleness in args.staleness:
        found = asyncio.run(measure(staleness, args.warm_up, args.steps, args.step_s, args.spare))
        print(json.dumps({"kind": "loop", **found}), flush=True)


if __name__ == "__main__":
    main()
