"""The rollout process from its first weights to its last: evaluate, play and follow, evaluate again."""

from __future__ import annotations

import asyncio
import shutil
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import stamina
import structlog

from hintloop.agent.engine import Engine, Sampling
from hintloop.agent.episode import Player
from hintloop.agent.policy import ChatFormat, load_renderer
from hintloop.envs.client import EnvPool
from hintloop.replay.episode import Episode
from hintloop.replay.journal import Journal, JournalWriter
from hintloop.replay.weights import WeightStore, version_name
from hintloop.rollout.config import EvaluationConfig, RolloutConfig, TeachersConfig
from hintloop.rollout.evaluate import Evaluation, draw_tasks, held_out
from hintloop.rollout.manager import GroupRule, Manager, choose_task
from hintloop.rollout.pacing import Pacer
from hintloop.rollout.status import Board, beat, write_json
from hintloop.rollout.teaching import Asking, open_asking
from hintloop.rollout.weights import Fetched, Score, check_probe, first_version, next_version

WRITER = "rollout"
ENV_WAIT_S = 120.0
"""How long an episode waits for a free environment, or for a server that is starting again."""
KEPT_VERSIONS = 2
"""Fetched versions that stay in the cache."""
ROSTER = "engines.txt"
"""File of a run's folder that names its inference servers, while it is there."""
_log = structlog.get_logger(__name__)


class RunningEngine(Engine, Protocol):
    """An engine that takes weights while it runs."""

    @property
    def version(self) -> int: ...
    async def load_weights(self, folder: Path, version: int) -> None: ...
    def stats(self) -> dict[str, float]: ...
    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Agent:
    """A model that has been loaded: its engine, how it talks, and how to score tokens with it."""

    engine: RunningEngine
    chat: ChatFormat
    score: Score | None = None
    servers: Callable[[], list[dict[str, Any]]] | None = None
    """What each inference server is doing. Given when the engine is servers, which fetch and check by themselves."""


LoadAgent = Callable[[Fetched], Agent]
"""Loads a fetched version; blocks."""


@dataclass(frozen=True, slots=True)
class RolloutSummary:
    """How a rollout process ended."""

    stopped: str
    """``final``: the learner is done; ``signal``: somebody asked to stop."""
    version: int
    groups: int
    """Groups in the journal, earlier processes included."""
    episodes: int
    """Episodes finished by this process."""
    lost: dict[str, int]
    seconds: float
    waited_s: float
    """Time that no group could start because the learner had to catch up."""
    evaluations: list[dict[str, Any]] = field(default_factory=list)


def run_rollout(
    *,
    run_dir: Path,
    journal_uri: str,
    weights_uri: str,
    env_url: str,
    splits: Mapping[str, Sequence[str]],
    model: str,
    env: str,
    seed: int,
    config: RolloutConfig,
    evaluation: EvaluationConfig,
    teachers: TeachersConfig,
    load_agent: LoadAgent | None = None,
) -> RolloutSummary:
    """Roll out until the learner has published its final version, or until SIGTERM or SIGINT.

    ``env_url`` is the environment server; ``splits`` are the task ids by split; ``model`` and ``env`` are
    names for the record. ``load_agent`` None loads the local engine. May be killed at any moment and called
    again: it goes on where the journal ends.
    Raises ``ValueError``, ``NoWeights``, ``LearnerSilent``, ``TooManyLost``, ``WeightsRefused``.
    """
    run = _Run(
        run_dir=run_dir,
        journal=Journal(journal_uri),
        store=WeightStore(weights_uri),
        env_url=env_url,
        splits=splits,
        model=model,
        env=env,
        seed=seed,
        config=config,
        evaluation=evaluation,
        teachers=teachers,
        load_agent=load_agent or _loader(run_dir, weights_uri, config, seed),
    )
    return asyncio.run(_until_signal(run))


def load_local_agent(first: Fetched, *, config: RolloutConfig, seed: int) -> Agent:
    """The local engine on a fetched version. Raises ``ValueError``."""
    from hintloop.rollout.engines.local import LocalEngine

    chat = load_renderer(first.folder)
    engine = LocalEngine.from_folder(
        first.folder,
        slots=config.engine_slots,
        max_length=config.max_tokens,
        threads=config.engine_threads,
        seed=seed + first.version,
        version=first.version,
        stop_ids=chat.renderer.get_stop_token_ids(),
    )
    return Agent(engine, chat, engine.score)


def load_remote_agent(first: Fetched, *, config: RolloutConfig, weights_uri: str, roster: Path) -> Agent:
    """Inference servers as the engine; ``roster`` is the file that may name others than ``config``."""
    from hintloop.rollout.engines.pool import Pool
    from hintloop.rollout.engines.vllm import Patience

    chat = load_renderer(first.folder)
    pool = Pool(
        config.engines,
        weights_uri=weights_uri if "://" in weights_uri else str(Path(weights_uri).expanduser().absolute()),
        stop_ids=chat.renderer.get_stop_token_ids(),
        patience=Patience(turn=config.engine_timeout_s, join=config.idle_timeout_s),
        probe_tolerance=config.probe_tolerance,
        roster=roster,
    )
    return Agent(pool, chat, servers=pool.servers)


def _loader(run_dir: Path, weights_uri: str, config: RolloutConfig, seed: int) -> LoadAgent:
    if not config.engines:
        return partial(load_local_agent, config=config, seed=seed)
    roster = run_dir / ROSTER
    return partial(load_remote_agent, config=config, weights_uri=weights_uri, roster=roster)


async def _until_signal(run: _Run) -> RolloutSummary:
    task = asyncio.create_task(run.run())
    if threading.current_thread() is threading.main_thread():
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, task.cancel)
    try:
        return await task
    except asyncio.CancelledError:
        return run.summary("signal")


@dataclass
class _Run:
    run_dir: Path
    journal: Journal
    store: WeightStore
    env_url: str
    splits: Mapping[str, Sequence[str]]
    model: str
    env: str
    seed: int
    config: RolloutConfig
    evaluation: EvaluationConfig
    teachers: TeachersConfig
    load_agent: LoadAgent
    board: Board = field(default_factory=Board)
    pool: EnvPool = field(init=False)
    pacer: Pacer | None = None
    rows: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        size = self.config.episodes_in_flight + self.evaluation.in_flight
        self.pool = EnvPool(self.env_url, size=size, wait_s=ENV_WAIT_S)

    async def run(self) -> RolloutSummary:
        path = self.run_dir / "status" / "rollout.json"
        heart = asyncio.create_task(beat(self.board, path))
        stopped = "stopped"
        try:
            await self._run()
            stopped = "finished"
            return self.summary("final")
        except Exception as error:
            stopped = f"failed: {error}"
            raise
        finally:
            heart.cancel()
            self.board.say(stopped)
            write_json(path, self.board.snapshot())

    def summary(self, stopped: str) -> RolloutSummary:
        pacer = self.pacer
        return RolloutSummary(
            stopped=stopped,
            version=pacer.version if pacer else -1,
            groups=pacer.journalled if pacer else 0,
            episodes=self.board.episodes,
            lost=dict(self.board.lost),
            seconds=time.time() - self.board.started_at,
            waited_s=pacer.waited_s if pacer else 0.0,
            evaluations=self.rows,
        )

    async def _run(self) -> None:
        config, cache = self.config, self.run_dir / "cache" / "weights"
        held_out(self.splits, self.evaluation.splits, self.config.split)  # before anything is started
        self.board.say("waiting for the learner to publish the first weights")
        first = await first_version(self.store, cache, poll_s=config.poll_s, timeout_s=config.idle_timeout_s)
        self.board.say(f"loading version {first.version}")
        agent = await asyncio.to_thread(self.load_agent, first)
        async with AsyncExitStack() as stack:
            stack.push_async_callback(agent.engine.close)
            stack.push_async_callback(self.pool.close)
            if agent.engine.version != first.version:
                self.board.say(f"bringing the inference servers to version {first.version}")
                await agent.engine.load_weights(first.folder, first.version)
            await check_probe(first, agent.score, config.probe_tolerance)
            done = await asyncio.to_thread(self.journal.group_ids)
            self.pacer = Pacer(
                groups_per_step=config.groups_per_step,
                max_staleness=config.max_staleness,
                journalled=len(done),
                version=first.version,
            )
            player = self._player(agent)
            asking = await open_asking(self.teachers, config.hint_writer, self.run_dir, stack)
            self._show(agent, asking)
            last = first
            if first.version == 0:
                await self._evaluate("before", player, self.evaluation.num_tasks)
            if not first.final:
                last = await self._play(player, agent, asking, done, cache, first)
            await self._evaluate("after", player, self.evaluation.num_tasks)
            assert last.final

    def _player(self, agent: Agent) -> Player:
        return Player(
            engine=agent.engine,
            chat=agent.chat,
            model=self.model,
            env=self.env,
            max_tokens=self.config.max_tokens,
            hint_role=self.config.hint_role,
        )

    def _show(self, agent: Agent, asking: Asking | None) -> None:
        """Put what others count on the board."""
        pacer = self.pacer
        assert pacer is not None
        self.board.details |= {
            "version": lambda: pacer.version,
            "groups_journalled": lambda: pacer.journalled,
            "groups_playing": lambda: pacer.playing,
            "groups_held": lambda: pacer.held,
            "groups_allowed": lambda: pacer.limit,
            "waited_s": lambda: round(pacer.waited_s, 2),
            "engine": agent.engine.stats,
        }
        if agent.servers is not None:
            self.board.details["servers"] = agent.servers
        if asking is not None:
            self.board.details["teachers"] = asking.snapshot

    async def _play(
        self, player: Player, agent: Agent, asking: Asking | None, done: set[str], cache: Path, first: Fetched
    ) -> Fetched:
        """Play groups until the final version is loaded; returns it."""
        assert self.pacer is not None
        writer = await asyncio.to_thread(self.journal.writer, WRITER)
        tasks = self.splits[self.config.split]
        manager = Manager(
            player=player,
            sampling=Sampling(self.config.temperature, self.config.max_new_tokens),
            open_environment=self.pool.session,
            task_of=partial(choose_task, tasks, self.seed),
            append=partial(append_group, writer),
            pacer=self.pacer,
            rule=_group_rule(self.config),
            board=self.board,
            metrics=self.run_dir / "metrics" / "rollout.jsonl",
            asking=asking,
        )
        playing = asyncio.create_task(manager.run(done))
        following = asyncio.create_task(self._follow(player, agent, cache, first))
        try:
            await asyncio.wait({playing, following}, return_when=asyncio.FIRST_COMPLETED)
            if playing.done():
                playing.result()
            return await following
        finally:
            playing.cancel()
            following.cancel()
            await asyncio.gather(playing, following, return_exceptions=True)

    async def _follow(self, player: Player, agent: Agent, cache: Path, now: Fetched) -> Fetched:
        """Load every new version until the final one; returns that."""
        assert self.pacer is not None
        while not now.final:
            now = await next_version(
                self.store, cache, after=now.version, poll_s=self.config.poll_s, whole=agent.servers is None
            )
            await agent.engine.load_weights(now.folder, now.version)
            await check_probe(now, agent.score, self.config.probe_tolerance)
            self.pacer.loaded(now.version)
            await asyncio.to_thread(_drop_old, cache, now.version)
            if not now.final and self._is_due(now.version):
                # Newer weights wait meanwhile, so that every episode of it is of this version.
                await self._evaluate("during", player, self.evaluation.num_tasks_during)
        return now

    def _is_due(self, version: int) -> bool:
        rows = self._evaluation().rows()
        last = max((row["version"] for row in rows if row["label"] == "during"), default=0)
        return any(last < step <= version for step in self.evaluation.during)

    def _evaluation(self) -> Evaluation:
        settings = self.evaluation
        return Evaluation(
            run_dir=self.run_dir,
            tasks={
                split: draw_tasks(tasks, settings.num_tasks, self.seed)
                for split, tasks in held_out(self.splits, settings.splits, self.config.split).items()
            },
            temperatures=settings.temperatures,
            max_new_tokens=self.config.max_new_tokens,
            in_flight=settings.in_flight,
            examples=settings.examples,
        )

    async def _evaluate(self, label: str, player: Player, n: int) -> None:
        assert self.pacer is not None

        def say(progress: str | None) -> None:
            self.board.evaluation = progress

        self.rows += await self._evaluation().run(
            label, self.pacer.version, n, player, self.pool.session, say
        )


def _group_rule(config: RolloutConfig) -> GroupRule:
    return GroupRule(
        group_size=config.group_size,
        episodes_in_flight=config.episodes_in_flight,
        tries_per_episode=config.tries_per_episode,
        max_groups_lost=config.max_groups_lost,
        idle_timeout_s=config.idle_timeout_s,
    )


def append_group(writer: JournalWriter, episodes: Sequence[Episode]) -> None:
    """Append a group, again for a while when the storage fails."""
    retries = stamina.retry_context(on=_storage_failed, attempts=8, timeout=60.0, wait_max=10.0)
    for attempt in retries:
        with attempt:
            writer.append(episodes)


def _storage_failed(error: Exception) -> bool:
    # A file that exists means another writer of the same name: no second try will change that.
    return isinstance(error, OSError) and not isinstance(error, FileExistsError)


def _drop_old(cache: Path, version: int) -> None:
    names = sorted((path for path in cache.glob("v*") if path.name <= version_name(version)), reverse=True)
    for path in names[KEPT_VERSIONS:]:
        shutil.rmtree(path, ignore_errors=True)
