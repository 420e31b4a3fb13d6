"""A learner's part among its replicas: its share of the groups, the outer rounds, and what makes them resumable.

Averages are numbered; a round is one average of each fragment, and a version is a round. Between two averages a
replica trains alone for a period. What it trained is in when its average is; when that fails, or when another's
state is taken over, the period is void.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import structlog
from torch import Tensor

from hintloop.learner.config import LearnerConfig
from hintloop.learner.progress import append_line, cut_lines
from hintloop.learner.ranks import Trained
from hintloop.learner.replicas.config import ReplicasConfig
from hintloop.learner.replicas.diloco import MISSING, OuterLoop, make_diloco_outer_loop, split_parameters
from hintloop.learner.replicas.manager import OuterManager, StoreManager
from hintloop.learner.replicas.share import OrderedJournal, ShareSource
from hintloop.learner.replicas.state import from_bytes, to_bytes
from hintloop.learner.replicas.store import ObjectStoreAllReduce
from hintloop.learner.source import POLL_SECONDS, GroupSource, ReadableJournal
from hintloop.replay.storage import Store
from hintloop.replay.weights import Manifest, version_name

KEPT = 3
"""Outer states that are kept; one more than checkpoints."""
_log = structlog.get_logger(__name__)

OpenSource = Callable[[ReadableJournal, "dict[str, Any] | None", "set[str]"], GroupSource]


@dataclass(frozen=True, slots=True)
class Average:
    """One attempt at an average, as this replica saw it; a line of ``metrics/outer.jsonl``."""

    step: int
    """Inner steps that count, after it."""
    average: int
    """Committed averages, after it."""
    members: tuple[int, ...]
    contributors: tuple[int, ...]
    committed: bool
    healed_from: int | None
    """Replica whose state this one took over."""


@dataclass(frozen=True, slots=True)
class Settled:
    """What an inner step has settled."""

    void_after: int | None = None
    """Steps after this one did not count."""
    round: bool = False
    """It has completed a round."""
    changed: bool = False
    """The others have changed more than the step itself."""


class Versions(Protocol):
    """What a replica asks of a weight store."""

    uri: str

    def latest(self) -> Manifest | None:
        """The newest version, or None before the first."""
        ...


class Replica:
    """One replica. Made at the start of a run, and joined to the others when its model is there."""

    def __init__(
        self,
        config: ReplicasConfig,
        learner: LearnerConfig,
        store: Versions,
        run_dir: Path,
        stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        """``run_dir``: of this replica alone. ``stopped`` ends a wait in a folder of rounds.

        ``ValueError`` for settings that replicas cannot have.
        """
        _require_fitting(config, learner)
        latest = store.latest()
        self._store = store
        self._floor = (latest.version if latest else 0) * config.fragments
        self._config, self._run_dir, self._stopped = config, run_dir, stopped
        self._order = f"{store.uri.rstrip('/')}/order"
        self._outer = Store(run_dir / "outer")
        self._healed_from: int | None = None

    def join(
        self,
        trained: Trained,
        journal: ReadableJournal,
        open_source: OpenSource,
        *,
        follow: bool,
        version: int,
        say: Callable[[str], None],
    ) -> ShareSource:
        """Meet the others from now on, with the state of ``version``, 0 for the start; gives the groups to train.

        ``say`` is told what this replica waits for. ``ValueError`` when there is no such state.
        """
        config = self._config
        self._trained = trained
        self._manager: OuterManager = _manager(config, self._floor, say, self._stopped)
        named = split_parameters(trained.model, config.fragments)
        loop = make_diloco_outer_loop(
            self._manager,
            named,
            trained.optimizer[0],
            outer_lr=config.outer_lr,
            outer_momentum=config.outer_momentum,
            nesterov=config.nesterov,
            sync_every=config.sync_every,
            fragment_sync_delay=config.fragment_sync_delay,
            fragment_update_alpha=config.fragment_update_alpha,
        )
        self.loop = OuterLoop(loop)
        order = OrderedJournal(journal, self._order) if follow else journal
        self._source = ShareSource(
            lambda position, seen: open_source(order, position, seen),
            journal,
            config.index,
            tuple(range(config.count)),
        )
        if version:
            self._load(version)
        self._manager.register_state_dict_fn("learner", self._take_over, self._give)
        self._before = self.step
        cut_lines(self._metrics, self._before)
        return self._source

    @property
    def step(self) -> int:
        """Inner steps that count, if those of the present period will."""
        return self._manager.current_step() * self._config.period + self.loop.local_step

    @property
    def round(self) -> int:
        """Rounds that are complete."""
        return self._manager.current_step() // self._config.fragments

    @property
    def behind(self) -> bool:
        """Whether the others are known to be further; training would be in vain until they have given their state."""
        return self._config.rounds is None and self._manager.current_step() < self._floor

    def publishes(self, version: int) -> bool:
        """Whether a version is this replica's to publish: the first of those that trained for it does it."""
        known = self._floor // self._config.fragments
        return version >= known and self._config.index == min(self._manager.contributors)

    def publishes_last(self, version: int) -> bool:
        """Whether the last version is this replica's to publish: those whose turn was before it have not done it.

        Waits for them, unless told to stop.
        """
        turn = sum(other < self._config.index for other in self._manager.contributors)
        deadline = time.monotonic() + turn * self._config.timeout_s
        while True:
            latest = self._store.latest()
            if latest and latest.version >= version:
                return False
            if time.monotonic() >= deadline:
                return True
            if self._stopped():
                return False
            time.sleep(POLL_SECONDS)

    def goes_on(self) -> bool:
        """Whether there must be another step, though there may be no group for it here."""
        return self._source.took > 0 or self.step % self._config.sync_every != 0

    def end_step(self) -> Settled:
        """To be called after each step of the inner optimizer."""
        local, period, delay = self.loop.local_step, self._config.period, self._config.fragment_sync_delay
        met = local == (period - delay) % period
        void_after = None
        if met:
            self._source.close(self._manager.members, self._manager.contributors)
            if self._healed_from is not None:  # what it did before is void; its steps from here on count
                void_after, self._before = self._before, self.step - local
        if local:
            return Settled(void_after, changed=met)
        committed = self._manager.committed
        if not committed and void_after is None:
            void_after = self._before
        self._before = self.step
        self._source.settle(committed)
        donor, self._healed_from = self._healed_from, None
        average = Average(
            self.step,
            self._manager.current_step(),
            self._manager.members,
            self._manager.contributors,
            committed,
            donor,
        )
        append_line(self._metrics, asdict(average))
        _log.info("replica.average", **asdict(average))
        complete = committed and self._manager.current_step() % self._config.fragments == 0
        return Settled(void_after, complete, changed=True)

    def global_weights(self) -> dict[str, Tensor] | None:
        """What all have in common, where that is not what this replica's model holds."""
        config = self._config
        same = config.fragments == 1 and not config.fragment_update_alpha
        return None if same else self.loop.global_parameters()

    def save(self, version: int) -> None:
        """Write what a checkpoint of ``version`` needs beside itself; before it, for a checkpoint is a promise."""
        state = {
            "manager": self._manager.state_dict(),
            "outer": self.loop.state(),
            "source": self._source.state(),
        }
        self._outer.replace(_file(version), to_bytes(state))
        for old in sorted(self._outer.names())[:-KEPT]:
            self._outer.remove(old)

    def leave(self) -> None:
        """The others need not wait for this one any more."""
        self._manager.shutdown()

    def _load(self, version: int) -> None:
        try:
            state = from_bytes(self._outer.read(_file(version)))
        except FileNotFoundError:
            raise ValueError(
                f"{self._run_dir} has no outer state of version {version}: no replica's"
            ) from None
        self._manager.load_state_dict(state["manager"])
        self.loop.load(state["outer"])
        self._source.load(state["source"])
        self._manager.members = self._source.members

    def _give(self) -> dict[str, Any]:
        source, trained = self._source.state(), self._trained.state()
        return {"donor": self._config.index, "source": source, "trained": trained}

    def _take_over(self, state: dict[str, Any]) -> None:
        self._trained.load(state["trained"])
        self._source.load(state["source"])
        self._healed_from = state["donor"]
        _log.info("replica.healed", donor=state["donor"], step=self.step)

    @property
    def _metrics(self) -> Path:
        return self._run_dir / "metrics" / "outer.jsonl"


def _require_fitting(config: ReplicasConfig, learner: LearnerConfig) -> None:
    """What would mean something else on each replica is refused."""
    if learner.steps % config.sync_every:
        raise ValueError(
            f"steps ({learner.steps}) must be a multiple of replicas.sync_every ({config.sync_every})"
        )
    if learner.max_minutes is not None:
        raise ValueError("replicas have no common clock: limit steps, not max_minutes")
    if learner.publish_every != 1:
        raise ValueError(
            "replicas publish every round: replicas.sync_every says how often, not publish_every"
        )
    if learner.sharded:
        raise ValueError("replicas average whole models: learner.sharded is for a learner without replicas")
    if learner.average_last:
        raise ValueError("each replica has another moving average: average_last has no meaning for replicas")


def _manager(
    config: ReplicasConfig, floor: int, say: Callable[[str], None], stopped: Callable[[], bool]
) -> OuterManager:
    if config.rounds is not None:
        reduce = ObjectStoreAllReduce(
            config.rounds,
            config.index,
            config.count,
            timeout_s=config.round_timeout_s,
            keep=config.fragments + 1,
            waiting=lambda missing: say(f"waiting for replica {', '.join(map(str, missing))}"),
            stopped=stopped,
        )
        return StoreManager(reduce)
    try:
        from hintloop.learner.replicas.live import ReplicaManager
    except ImportError as error:
        raise ValueError(MISSING) from error
    assert config.lighthouse is not None, "one of the two is given"
    return ReplicaManager(
        config.index,
        config.count,
        config.lighthouse,
        host=config.host,
        timeout_s=config.timeout_s,
        quorum_timeout_s=config.round_timeout_s,
        min_replicas=config.min_replicas,
        floor=floor,
        waiting=lambda: say("waiting for the other replicas"),
    )


def _file(version: int) -> str:
    return f"{version_name(version)}.safetensors"
