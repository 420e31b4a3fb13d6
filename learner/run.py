"""The learner's loop: take groups, train one step, write the checkpoint, publish; again.

Left out on purpose: evaluation and schedules. A step exists when its checkpoint does; only then is its version
published. After a crash the learner goes on from the newest checkpoint, publishes what was checkpointed but not
published, and cuts its own records back to the checkpoint, so no group is trained twice or lost. Among replicas
(``replicas/``) all this goes for the rounds in which they meet.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog
import torch
from transformers import AutoTokenizer, TrainerCallback

from hintloop.learner import checkpoint as checkpoints
from hintloop.learner.batch import BatchRules, StepBatch, build_step
from hintloop.learner.config import LearnerConfig
from hintloop.learner.models import SideWeights, Weights, holding, load_model, make_optimizer, probe
from hintloop.learner.patience import GivenUp, Patience, PatientJournal, PatientWeights
from hintloop.learner.progress import Heartbeat, Records
from hintloop.learner.ranks import Ranks, Trained, follow_leader, load_parts
from hintloop.learner.replicas.config import ReplicasConfig
from hintloop.learner.replicas.replica import Replica
from hintloop.learner.replicas.share import ShareSource
from hintloop.learner.source import GroupSource, IdleTimeout, ReadableJournal
from hintloop.learner.stop import sigterm
from hintloop.learner.trainer import ThreeChannelTrainer
from hintloop.replay.episode import Episode
from hintloop.replay.journal import Journal
from hintloop.replay.weights import WeightStore

FINISHED = ("steps", "max_minutes", "journal_end")
"""Reasons to end that make the last version final; a stopped or idle run may go on later."""
_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class LearnerSummary:
    """How a run of the learner ended."""

    step: int
    """Optimizer steps done, over all restarts."""
    version: int
    """Newest version. It is published, unless the run was stopped while the storage failed; a restart does it then."""
    episodes: int
    """Episodes that went into these steps, unusable ones included."""
    reason: str
    """``steps``, ``max_minutes``, ``signal``, ``journal_end`` or ``idle``."""
    seconds: float
    """Wall time of this process in the loop."""
    counts: dict[str, int]
    """What was used and what was not, over all restarts; see ``COUNTED``."""


def run_learner(
    student: Path,
    journal_uri: str,
    weights_uri: str,
    run_dir: Path,
    config: LearnerConfig,
    *,
    follow: bool,
    replicas: ReplicasConfig | None = None,
    on_progress: Callable[[dict[str, Any]], None] | None = None,
) -> LearnerSummary:
    """Train ``student`` (a model folder) on a journal and publish versions, until there is a reason to end.

    ``follow`` waits for more episodes at the end of the journal; otherwise that is read ``config.epochs``
    times. ``replicas``: this is one of several, which share journal and weights; each has a ``run_dir`` of its own.
    ``on_progress`` gets each step's metrics. SIGTERM ends the run after the step in hand, when called
    from the main thread. The last version's metadata has ``final: true`` when there is nothing left to train
    (``FINISHED``). Sets torch's number of threads.
    Started as one of several processes by a distributed launcher, all of them return the same, and only the first one
    writes; each is to call ``leave_process_group`` before it ends. ``ValueError`` when the weight store holds versions
    that ``run_dir`` knows nothing of; ``StorageFailed`` when journal or weights fail for
    ``config.storage_timeout_s``.
    """
    torch.set_num_threads(config.threads)
    ranks = Ranks()
    if not ranks.leads:
        with sigterm():  # the leader decides when to end
            summary: LearnerSummary = follow_leader(ranks, student, config)
            return summary
    with sigterm() as stopped:
        patience = Patience(config.storage_timeout_s, stopped)
        store = PatientWeights(WeightStore(weights_uri), patience)
        replica = Replica(replicas, config, store, run_dir, stopped) if replicas else None
        learner = _Learner(
            student, Journal(journal_uri), store, run_dir, config, follow, ranks, replica, patience
        )
        try:
            return learner.run(stopped, on_progress or (lambda _: None))
        finally:
            if replica:
                replica.leave()


class _Learner:
    """The work of the leading process, or the only one, on a run."""

    def __init__(
        self,
        student: Path,
        journal: Journal,
        store: PatientWeights,
        run_dir: Path,
        config: LearnerConfig,
        follow: bool,
        ranks: Ranks,
        replica: Replica | None,
        patience: Patience,
    ) -> None:
        self._student, self._store, self._run_dir, self._config = student, store, run_dir, config
        self._follow, self._ranks, self._replica, self._patience = follow, ranks, replica, patience
        self._reason = ""
        self._started = time.monotonic()
        self._heartbeat = Heartbeat(run_dir / "status" / "learner.json")
        self._heartbeat.beat("starting", step=0, version=0)
        self._records = Records(run_dir)
        found = checkpoints.newest(run_dir / "checkpoints")
        self._elapsed_before = found.state.elapsed_s if found else 0.0
        self._model = found.load(student, config) if found else load_model(student, config)
        self._optimizer = make_optimizer(self._model, config)
        self._side = SideWeights.of(load_model(student, config) if found else self._model, config)
        self._trained = self._whole = Trained(self._model, self._optimizer, self._moving_teacher)
        side = self._side
        if config.sharded and ranks.count > 1:
            self._trained, side = load_parts(student, config)
        self._trainer = ThreeChannelTrainer(
            self._trained.model,
            AutoTokenizer.from_pretrained(student, local_files_only=True),
            config,
            ranks.lead(self._batches(), lambda: self._step),
            side=side,
            optimizer=self._trained.optimizer,
            output_dir=run_dir / "checkpoints",
            callbacks=[_Steps(self, ranks)],
        )
        if found:
            found.restore(self._optimizer, self._moving_teacher)
        self._resume(found, journal)

    def _resume(self, found: checkpoints.Checkpoint | None, journal: Journal) -> None:
        """Take up the state of a checkpoint, make one if there is none, and publish it if it is not."""
        state = found.state if found else checkpoints.State(0, 0, None, 0.0, {})
        trained = self._records.cut(state.step)
        self._step, self._version, self._position = state.step, state.version, state.position
        epoch = state.position["epoch"] if state.position else 0
        self._timings = {"waiting": 0.0, "publishing": 0.0}
        self._patience.waiting = self._wait_for_storage
        latest = self._store.latest()
        self._source: GroupSource | ShareSource
        if self._replica:
            self._source = self._replica.join(
                self._trained,
                PatientJournal(journal, self._patience),
                self._open_source,
                follow=self._follow,
                version=state.version,
                say=self._say,
            )
        else:
            seen = {group for record in trained if record["epoch"] == epoch for group in record["groups"]}
            self._source = self._open_source(journal, state.position, seen)
            if latest and latest.version > (found.state.version if found else -1):
                raise ValueError(
                    f"{self._store.uri} holds version {latest.version}, but the newest checkpoint in "
                    f"{self._run_dir} is {found.state.version if found else 'missing'}; "
                    "use another weight store for another run"
                )
        if not found:
            self._commit(final=False)
            return
        self._saved = found
        if not latest or latest.version < found.state.version:
            self._publish()

    def _open_source(
        self, journal: ReadableJournal, position: dict[str, Any] | None, seen: set[str]
    ) -> GroupSource:
        return GroupSource(
            PatientJournal(journal, self._patience),  # a replica's has a log of its own around the run's
            position=position,
            seen=seen,
            follow=self._follow,
            epochs=self._config.epochs,
            idle_timeout_s=self._config.idle_timeout_s,
            only=self._config.only,
        )

    def run(
        self, stopped: Callable[[], bool], on_progress: Callable[[dict[str, Any]], None]
    ) -> LearnerSummary:
        """Train until there is a reason to end, and make the last version final."""
        self._stopped, self._on_progress = stopped, on_progress
        more = self._follow and not self._done() and self._saved.state.metadata["final"]
        if more and not self._replica:
            self._commit_again(final=False)  # there is more to do than the earlier process was told
        with self._replica.loop if self._replica else nullcontext():
            if not self._over():
                self._ranks.begin(self._trained, self._whole)
                self._trainer.train()
        reason = self._reason or self._over() or "journal_end"
        final = reason in FINISHED
        if self._replica:
            if final and self._replica.publishes_last(self._version):
                self._put(self._version)
        elif self._saved.state.step != self._step:
            self._commit(final=final)
        elif final and not self._saved.state.metadata["final"]:
            self._commit_again(final=True)
        reason = self._reason or reason
        self._heartbeat.beat(f"ended: {reason}", step=self._step, version=self._version)
        _log.info("learner.ended", reason=reason, step=self._step, version=self._version)
        summary = LearnerSummary(
            self._step,
            self._version,
            self._records.episodes,
            reason,
            time.monotonic() - self._started,
            dict(self._records.counts),
        )
        self._ranks.end(summary)
        return summary

    def begin(self, state: Any) -> None:
        """Let the trainer count on from the checkpoint."""
        state.global_step = self._step

    def end_step(self, state: Any, control: Any) -> None:
        """The weights have been updated: record, checkpoint and publish them."""
        self._step += 1
        if self._replica:
            self._end_inner_step(self._replica, state, control)
            return
        self._version += 1
        metrics = self._record()
        final = bool(self._done()) or self._at_end()
        ending = final or self._stopped()
        if ending or self._step % self._config.publish_every == 0:
            self._commit(final=final)
        control.should_training_stop |= ending
        self._on_progress(metrics)

    def _end_inner_step(self, replica: Replica, state: Any, control: Any) -> None:
        """The same where a checkpoint is a round, and a step may turn out not to count."""
        settled = replica.end_step()
        metrics = self._record() if self._batch.group_ids else None
        if settled.void_after is not None:
            self._records.cut(settled.void_after)
        if settled.changed:
            self._ranks.changed(self._trained)
        self._step = state.global_step = replica.step
        self._version = replica.round
        final = settled.round and (bool(self._done()) or self._at_end())
        if settled.round:
            self._commit(final=final)
        control.should_training_stop = final or self._stopped()
        if metrics:
            self._on_progress(metrics)

    def _record(self) -> dict[str, Any]:
        """Write down the step; its metrics."""
        metrics = self._metrics()
        self._records.add(self._trained_record, metrics)
        return metrics

    def _batches(self) -> Iterator[StepBatch]:
        """Steps, as the journal gives them."""
        vocabulary = self._model.config.get_text_config().vocab_size
        rules = BatchRules.of(self._config, vocabulary, live=self._follow)
        while not self._over():
            before = time.monotonic()
            try:
                groups = self._take()
            except IdleTimeout as error:
                _log.error("learner.idle", reason=str(error))
                self._reason = "idle"
                return
            except GivenUp as error:
                self._give_up(error)
                return
            if groups is None:
                return
            self._training_since = time.monotonic()
            self._timings["waiting"] = self._training_since - before
            self._say(f"training step {self._step + 1}")
            seed = (self._config.seed, self._step)
            self._batch = build_step(groups, rules, version=self._version, seed=seed)
            self._position = self._source.position
            self._trained_record = {
                "step": self._step + 1,
                "epoch": self._source.epoch,
                "groups": list(self._batch.group_ids),
                "episodes": list(self._batch.episode_ids),
            }
            yield self._batch

    def _take(self) -> list[list[Episode]] | None:
        """The groups of the next step; None at the end. A replica may need a step without any."""
        if self._replica and self._replica.behind:
            return []
        groups = self._source.take(
            self._config.groups_per_step, stop=lambda: bool(self._over()), waiting=self._wait
        )
        goes_on = self._replica is not None and not self._over() and self._replica.goes_on()
        return groups if groups or goes_on else None

    def _wait(self) -> None:
        self._say("waiting for episodes")
        self._ranks.keep_alive()

    def _wait_for_storage(self, what: str) -> None:
        self._say(f"waiting for a storage that fails: {what}")
        self._ranks.keep_alive()

    def _give_up(self, error: GivenUp) -> None:
        _log.warning("learner.given_up", reason=str(error))
        self._reason = "signal"

    def _at_end(self) -> bool:
        """Whether nothing is left in a recorded journal, as far as can be seen."""
        try:
            return self._source.at_end()
        except GivenUp as error:
            self._give_up(error)
            return False

    def _say(self, state: str) -> None:
        self._heartbeat.beat(state, step=self._step, version=self._version)

    def _over(self) -> str:
        """Why to end now; empty to go on."""
        return self._done() or ("signal" if self._stopped() else "")

    def _done(self) -> str:
        """Why there is nothing left to train, now or after a restart; empty when there is."""
        limit = self._config.max_minutes
        if self._step >= self._config.steps:
            return "steps"
        return "max_minutes" if limit is not None and self._elapsed() >= 60.0 * limit else ""

    def _elapsed(self) -> float:
        return self._elapsed_before + time.monotonic() - self._started

    def _metrics(self) -> dict[str, Any]:
        return {
            "step": self._step,
            "version": self._version,
            "time": time.time(),
            **self._batch.counts,
            "groups_repeated": self._source.repeated,
            "groups_unwanted": self._source.unwanted,
            "segments_damaged": self._source.damaged,
            **self._trainer.step_metrics(),
            "seconds_waiting": self._timings["waiting"],
            "seconds_training": time.monotonic() - self._training_since,
            "seconds_publishing": self._timings["publishing"],
        }

    def _commit(self, *, final: bool) -> None:
        """Checkpoint first, then publish."""
        before = time.monotonic()
        self._ranks.gather()
        average = self._moving_teacher if final and self._config.average_last else None
        if self._replica:
            average = self._replica.global_weights()
            self._replica.save(self._version)
        with holding(self._model, average):
            metadata = {"step": self._step, "final": final, "probe": probe(self._model)}
        self._saved = checkpoints.save(
            self._run_dir / "checkpoints",
            checkpoints.State(self._step, self._version, self._position, self._elapsed(), metadata),
            model=self._model,
            published=average,
            student=self._student,
            optimizer=self._optimizer,
            teacher=self._moving_teacher,
            adapters=bool(self._config.lora_rank),
        )
        self._publish()
        self._timings["publishing"] = time.monotonic() - before

    def _commit_again(self, *, final: bool) -> None:
        """The same weights as a new version, to say that they are the last, or that they are not."""
        self._version += 1
        self._commit(final=final)

    def _publish(self) -> None:
        state = self._saved.state
        if self._replica and not self._replica.publishes(state.version):
            return
        self._heartbeat.beat(f"publishing version {state.version}", step=state.step, version=state.version)
        self._put(state.version)

    def _put(self, version: int) -> None:
        """Publish the checkpoint; when told to stop while that fails, the next start does it."""
        try:
            self._store.publish(version, self._saved.published, metadata=self._saved.state.metadata)
            self._store.prune(self._config.keep_versions)
        except GivenUp as error:
            self._give_up(error)

    @property
    def _moving_teacher(self) -> Weights | None:
        return self._side.teacher if self._config.teacher == "ema" else None


class _Steps(TrainerCallback):
    """Tells the learner where the trainer is."""

    def __init__(self, learner: _Learner, ranks: Ranks) -> None:
        self._learner, self._ranks = learner, ranks

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._learner.begin(state)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._learner.end_step(state, control)
        if control.should_training_stop:
            self._ranks.stop()
