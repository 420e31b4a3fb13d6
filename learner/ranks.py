"""The processes of one learner, as ``torchrun`` or ``accelerate launch`` starts them.

The first one leads: it reads the journal, keeps the records and publishes. The others do the steps that it sends
them, each on its share of the micro-batches. Messages go over the launcher's own process group, within one job.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from hintloop.learner.batch import StepBatch
from hintloop.learner.config import LearnerConfig
from hintloop.learner.models import SideWeights, Weights, hold, load_model, make_optimizer
from hintloop.learner.sharding import gathered, is_sharded, map_tensors, outline, scattered, shard
from hintloop.learner.trainer import ThreeChannelTrainer

ALIVE_SECONDS = 10.0
"""A leader with nothing to send says so this often, for a process group does not wait for ever."""


@dataclass(frozen=True, slots=True)
class Trained:
    """All that steps change. ``teacher`` is the moving average, if there is one."""

    model: Any
    optimizer: tuple[torch.optim.Optimizer, Any]
    teacher: Weights | None

    def state(self) -> dict[str, Any]:
        """For another process that goes on from here."""
        weights = {name: p.detach() for name, p in self.model.named_parameters() if p.requires_grad}
        optimizer, scheduler = (part.state_dict() for part in self.optimizer)
        return {"weights": weights, "optimizer": optimizer, "scheduler": scheduler, "teacher": self.teacher}

    def load(self, state: dict[str, Any]) -> None:
        """The inverse of ``state``."""
        hold(self.model, state["weights"])
        self.optimizer[0].load_state_dict(state["optimizer"])
        self.optimizer[1].load_state_dict(state["scheduler"])
        for name, value in (self.teacher or {}).items():
            value.copy_(state["teacher"][name])


class Ranks:
    """This process's place among those of the learner; alone, it leads and nothing is sent."""

    def __init__(self) -> None:
        self.index = int(os.environ.get("RANK", "0"))
        self.count = int(os.environ.get("WORLD_SIZE", "1"))
        self._sent = time.monotonic()
        self._changed: Trained | None = None
        self._trained: Trained | None = None
        self._whole: Trained | None = None
        self._stopped = False
        self._result: Any = None

    @property
    def leads(self) -> bool:
        """Whether this is the process that decides."""
        return self.index == 0

    def begin(self, trained: Trained, whole: Trained) -> None:
        """To be called by the leader before it trains, if it does; all take over the state of ``whole``.

        That is ``trained`` itself, or else what of all processes' parts of it are gathered in.
        """
        if trained is whole:
            self._send_state(trained)
            return
        self._trained, self._whole = trained, whole
        state = whole.state()
        self._send("state", outline(state))
        trained.load(scattered(state, trained.model))

    def gather(self) -> None:
        """Bring the whole up to date with the parts that processes train, if these have begun."""
        if self._trained and self._whole:
            self._send("gather", None)
            self._whole.load(gathered(self._trained.state(), keep=True))

    def lead(self, batches: Iterable[StepBatch], step: Callable[[], int]) -> Iterator[StepBatch]:
        """The batches, each sent to the others with the steps before it, and then used."""
        for batch in batches:
            if self._changed:
                self._send_state(self._changed)
                self._changed = None
            self._send("batch", (step(), batch))
            yield batch
        self.stop()

    def changed(self, trained: Trained) -> None:
        """The leader's state is not what the last step has made of it."""
        self._changed = trained

    def stop(self) -> None:
        """No step follows; to be called as soon as that is so, for the end of a training is a meeting, too."""
        if not self._stopped:
            self._stopped = True
            self._send("stop", None)

    def keep_alive(self) -> None:
        """To be called while the leader waits."""
        if time.monotonic() - self._sent > ALIVE_SECONDS:
            self._send("waiting", None)

    def end(self, result: Any) -> None:
        """The leader is done; the others end with its result."""
        self._send("end", result)

    def begins(self, trained: Trained) -> bool:
        """Whether there is anything to do; waits for the leader's state, and takes it over."""
        kind, content = self._receive()
        if kind == "end":
            self._result = content
            return False
        self._trained = trained
        trained.load(scattered(content, trained.model) if is_sharded(trained.model) else content)
        return True

    def follow(self, trained: Trained, begin: Callable[[int], None]) -> Iterator[StepBatch]:
        """What the leader sends, until it stops; ``begin`` gets the steps before each."""
        while True:
            kind, content = self._receive()
            if kind == "stop":
                return
            if kind == "state":
                trained.load(content)
            elif kind == "batch":
                step, batch = content
                begin(step)
                yield batch

    def result(self) -> Any:
        """What the leader ended with."""
        if self._result is None:
            _, self._result = self._receive()
        return self._result

    def _send_state(self, trained: Trained) -> None:
        if self.count > 1:
            self._send("state", map_tensors(lambda tensor: tensor.cpu(), trained.state()))

    def _send(self, kind: str, content: Any) -> None:
        if self.count > 1:
            self._sent = time.monotonic()
            torch.distributed.broadcast_object_list([(kind, content)], src=0)

    def _receive(self) -> tuple[str, Any]:
        while True:
            message: list[Any] = [None]
            torch.distributed.broadcast_object_list(message, src=0)
            kind, content = message[0]
            if kind == "gather":
                assert self._trained, "gathered before anything was trained"
                gathered(self._trained.state(), keep=False)
            elif kind != "waiting":
                return kind, content


def load_parts(student: Path, config: LearnerConfig) -> tuple[Trained, SideWeights]:
    """What a run begins with as one of several processes trains it, and the weights beside it."""
    model = load_model(student, config)
    if config.sharded:
        shard(model)
    side = SideWeights.of(model, config)
    return Trained(
        model, make_optimizer(model, config), side.teacher if config.teacher == "ema" else None
    ), side


def follow_leader(ranks: Ranks, student: Path, config: LearnerConfig) -> Any:
    """Make the steps that the leading process makes; gives what it ended with."""
    trained, side = load_parts(student, config)
    trainer = ThreeChannelTrainer(
        trained.model,
        AutoTokenizer.from_pretrained(student, local_files_only=True),
        config.model_copy(update={"steps": sys.maxsize}),  # the leader says when to stop
        ranks.follow(trained, lambda step: setattr(trainer.state, "global_step", step)),
        side=side,
        optimizer=trained.optimizer,
        output_dir=Path("unused"),
    )
    if ranks.begins(trained):
        trainer.train()
    return ranks.result()


def leave_process_group() -> None:
    """To be called by each of several processes when it is done.

    A group's threads let go of the tensors of its last messages; one that still does so while Python shuts down aborts
    the process. What a trainer leaves behind keeps the group and its threads, in cycles, until these are collected.
    """
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
        gc.collect()
