"""The rollout process from its first weights to its last: evaluate, play and follow, evaluate again."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from hintloop.agent.engine import Sampling
from hintloop.agent.episode import Player
from hintloop.agent.external import open_player
from hintloop.envs.pool import EnvPool
from hintloop.replay.journal import Journal
from hintloop.replay.weights import WeightStore
from hintloop.rollout.config import EvaluationConfig, RolloutConfig, TeachersConfig
from hintloop.rollout.evaluate import Evaluation, draw_tasks, held_out
from hintloop.rollout.failures import Part
from hintloop.rollout.loading import Agent, LoadAgent, loader
from hintloop.rollout.loop_lag import LoopLag
from hintloop.rollout.manager import RESAMPLED, GroupRule, Manager
from hintloop.rollout.offload import housekeeping, persist
from hintloop.rollout.pacing import Pacer
from hintloop.rollout.sampler import TaskSampler, make_sampler, past_results
from hintloop.rollout.status import WRITE_S, Board, StatusFile
from hintloop.rollout.teaching import Asking, open_asking
from hintloop.rollout.watchdog import Pulse, Watchdog
from hintloop.rollout.weights import Fetched, check_probe, drop_old, first_version, next_version

WRITER = "rollout"
ENV_WAIT_S = 120.0
"""How long an episode waits for a free environment, or for a server that is starting again."""
GRACE_S = 30.0
"""What the engine may take beyond its own deadline for a turn, or for new weights."""
T = TypeVar("T")


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
    env_url: str | Sequence[str],
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

    ``env_url``: the environment server, or several; ``splits`` are the task ids by split; ``model`` and ``env``
    are names for the record. ``load_agent`` None loads the engine that ``config`` names. May be killed at any moment
    and called again: it goes on where the journal ends.
    Raises ``ValueError``, ``NoWeights``, ``LearnerSilent``, ``TooManyLost``, ``WeightsRefused``, ``StorageFailed``.
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
        load_agent=load_agent or loader(run_dir, weights_uri, config, seed),
    )
    return asyncio.run(_until_signal(run))


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
    env_url: str | Sequence[str]
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
    watchdog: Watchdog = field(init=False)
    pacer: Pacer | None = None
    rows: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        size = self.config.episodes_in_flight + self.evaluation.in_flight
        self.pool = EnvPool(self.env_url, size=size, wait_s=ENV_WAIT_S)
        self.watchdog = Watchdog(self.config.notice_s)

    async def run(self) -> RolloutSummary:
        status = StatusFile(self.board, self.run_dir / "status" / "rollout.json")
        lag = LoopLag()
        lag.watch(status.write_blocked)
        self.board.details |= {
            "waits": self.watchdog.snapshot,
            "loop": lag.snapshot,
            "env_servers": self.pool.servers,
        }
        beside = [housekeeping(task) for task in (status.beat(), lag.run(), self.watchdog.run())]
        stopped = "stopped"
        try:
            await self._run()
            stopped = "finished"
            return self.summary("final")
        except Exception as error:
            stopped = f"failed: {error}"
            raise
        finally:
            lag.stop()
            for task in beside:
                task.cancel()
            await asyncio.wait(beside, timeout=2 * WRITE_S)
            self.board.say(stopped)
            status.write()

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
        held_out(self.splits, self.evaluation.splits, self.config.split)  # before anything is started
        cache = self.run_dir / "cache" / "weights"
        async with AsyncExitStack() as stack:
            first, agent, done = await self._start(stack, cache)
            opened = open_player(
                self._player(agent),
                self.config.agent,
                idle_s=self.config.agent_timeout_s,
                refuse_sampling=self.config.agent_sampling == "refuse",
            )
            player = await stack.enter_async_context(opened)
            asking = await open_asking(self.teachers, self.config.hint_writer, self.run_dir, stack)
            self._show(agent, asking)
            last = first
            if first.version == 0:
                await self._evaluate("before", player, self.evaluation.num_tasks)
            if not first.final:
                last = await self._play(player, agent, asking, done, cache, first)
            await self._evaluate("after", player, self.evaluation.num_tasks)
            assert last.final

    async def _start(self, stack: AsyncExitStack, cache: Path) -> tuple[Fetched, Agent, set[str]]:
        """The first weights, the agent that has them, and the groups in the journal."""
        config = self.config
        with self.watchdog.task("start") as pulse:
            self.board.say("waiting for the learner to publish the first weights")
            pulse.beat("the learner's first weights", config.idle_timeout_s)
            first = await first_version(
                self.store,
                cache,
                poll_s=config.poll_s,
                timeout_s=config.idle_timeout_s,
                on_failure=self._storage_failed,
            )
            self.board.say(f"loading version {first.version}")
            pulse.beat("the model to be loaded")
            agent = await asyncio.to_thread(self.load_agent, first)
            stack.push_async_callback(agent.engine.close)
            stack.push_async_callback(self.pool.close)
            if agent.engine.version != first.version:
                self.board.say(f"bringing the inference servers to version {first.version}")
                await self._load(agent, first, pulse)
            else:
                await check_probe(first, agent.score, config.probe_tolerance)
            pulse.beat("the journal's storage", config.storage_timeout_s)
            done = await self._stored("reading the journal", self.journal.group_ids)
        self.pacer = Pacer(
            groups_per_step=config.groups_per_step,
            max_staleness=config.max_staleness,
            journalled=len(done),
            version=first.version,
        )
        return first, agent, done

    async def _load(self, agent: Agent, version: Fetched, pulse: Pulse) -> None:
        """Bring the engine to a version, and see that it computes what the learner does."""
        on = f"the engine to load version {version.version}"
        async with pulse.waiting(on, Part.ENGINE, self.config.idle_timeout_s + GRACE_S):
            await agent.engine.load_weights(version.folder, version.version)
            await check_probe(version, agent.score, self.config.probe_tolerance)

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
        writer = await self._stored("reading the journal", partial(self.journal.writer, WRITER))
        metrics = self.run_dir / "metrics" / "rollout.jsonl"
        sampler = await self._sampler(metrics, done)
        manager = Manager(
            player=player,
            sampling=Sampling(self.config.temperature, self.config.max_new_tokens),
            open_environment=self.pool.session,
            task_of=sampler.choose,
            observe=sampler.observe,
            append=writer.append,
            pacer=self.pacer,
            rule=_group_rule(self.config),
            board=self.board,
            metrics=metrics,
            asking=asking,
            watchdog=self.watchdog,
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

    async def _sampler(self, metrics: Path, done: set[str]) -> TaskSampler:
        """The sampler, as it was when the run stopped."""
        config = self.config
        sampler = make_sampler(
            self.splits[config.split],
            self.seed,
            kind=config.task_sampling,
            weights=config.task_weights,
            group_size=config.group_size,
        )
        if config.task_sampling == "curriculum":
            past = partial(past_results, metrics, metrics.with_name(RESAMPLED), self.journal, done)
            for result in await self._stored("reading the journal", past):
                sampler.observe(result)
        return sampler

    async def _follow(self, player: Player, agent: Agent, cache: Path, now: Fetched) -> Fetched:
        """Load every new version until the final one; returns that."""
        assert self.pacer is not None
        with self.watchdog.task("weight roll-out") as pulse:
            while not now.final:
                now = await next_version(
                    self.store,
                    cache,
                    after=now.version,
                    poll_s=self.config.poll_s,
                    fetch_s=self.config.idle_timeout_s,
                    whole=agent.needs_files,
                    on_look=lambda: pulse.beat("the storage of the weights"),
                    on_failure=self._storage_failed,
                )
                with self.pacer.not_looking():
                    await self._load(agent, now, pulse)
                    self.pacer.loaded(now.version)
                    await asyncio.to_thread(drop_old, cache, now.version)
                    if not now.final and self._is_due(now.version):
                        pulse.beat("an evaluation")
                        # Newer weights wait meanwhile, so that every episode of it is of this version.
                        await self._evaluate("during", player, self.evaluation.num_tasks_during)
        return now

    async def _stored(self, what: str, call: Callable[[], T]) -> T:
        """What a call to a storage returns, tried again while that fails."""
        patience = self.config.storage_timeout_s
        return await persist(call, what=what, patience_s=patience, on_failure=self._storage_failed)

    def _storage_failed(self, error: OSError) -> None:
        self.board.fail(Part.STORAGE)

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
            watchdog=self.watchdog,
            turn_s=_group_rule(self.config).turn_s,
            on_lost=lambda part, reason: self.board.fail(part),
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
        turn_s=config.engine_timeout_s + GRACE_S,
        resample_equal=config.resample_equal,
        storage_timeout_s=config.storage_timeout_s,
    )
