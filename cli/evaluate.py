"""``hintloop evaluate``: the held-out evaluation of one model.

It starts an environment server of its own, unless ``env.servers`` names some.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hintloop.agent.episode import Player
from hintloop.agent.external import open_player
from hintloop.cli.config import Config
from hintloop.cli.model import prepare_student
from hintloop.cli.play import env_options
from hintloop.cli.runfolder import RunFolder
from hintloop.cli.supervise import ChildFailed, ChildSpec, Supervisor
from hintloop.envs.pool import EnvPool
from hintloop.envs.registry import find_taskset
from hintloop.rollout.evaluate import Evaluation, draw_tasks, held_out
from hintloop.rollout.loading import load_local_agent
from hintloop.rollout.weights import Fetched

READY_S = 120.0
_SHOWN = ("split", "temperature", "n", "solved", "rate", "low", "high", "errors_per_episode", "seconds")


def evaluate_model(config: Config) -> list[dict[str, Any]]:
    """One row per split and temperature. Raises ``UserError`` and what the engine or the server raise."""
    with tempfile.TemporaryDirectory(prefix="hintloop-") as name, Supervisor() as supervisor:
        folder = RunFolder(Path(name))
        student = prepare_student(config.student, folder.student)
        urls = config.env.servers or [_start_server(supervisor, folder, config)]
        rows = asyncio.run(_evaluate(config, student, folder.path, urls))
    return [{key: row[key] for key in _SHOWN} for row in rows]


def _start_server(supervisor: Supervisor, folder: RunFolder, config: Config) -> str:
    ready = folder.path / "env.url"
    options = [*env_options(config.env, port=0), "--ready-file", str(ready)]
    command = [sys.executable, "-m", "hintloop.cli.main", "serve", "env", *options]
    supervisor.start(ChildSpec("env", command, folder.log("env"), server=True))
    try:
        return supervisor.wait_file("env", ready, timeout_s=READY_S)
    except ChildFailed as error:
        raise ChildFailed(error.name, f"{error}: {error.tail}", "") from error


async def _evaluate(
    config: Config, student: Path, run_dir: Path, urls: Sequence[str]
) -> list[dict[str, Any]]:
    rollout, settings = config.rollout, config.evaluation
    found = find_taskset(config.env.tasks)
    held = held_out(found.splits(), settings.splits, rollout.split)
    version = Fetched(version=0, folder=student, final=True, metadata={})
    agent = await asyncio.to_thread(load_local_agent, version, config=rollout, seed=config.run.seed)
    pool = EnvPool(urls, size=settings.in_flight)
    evaluation = Evaluation(
        run_dir=run_dir,
        tasks={name: draw_tasks(tasks, settings.num_tasks, config.run.seed) for name, tasks in held.items()},
        temperatures=settings.temperatures,
        max_new_tokens=rollout.max_new_tokens,
        in_flight=settings.in_flight,
        examples=0,
    )
    player = Player(
        engine=agent.engine,
        chat=agent.chat,
        model=config.student.model,
        env=found.name,
        max_tokens=rollout.max_tokens,
        hint_role=rollout.hint_role,
    )
    try:
        opened = open_player(
            player,
            rollout.agent,
            idle_s=rollout.agent_timeout_s,
            refuse_sampling=rollout.agent_sampling == "refuse",
        )
        async with opened as playing:
            return await evaluation.run(
                "alone", 0, settings.num_tasks, playing, pool.session, lambda progress: None
            )
    finally:
        await pool.close()
        await agent.engine.close()
