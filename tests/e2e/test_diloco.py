"""Three learners that meet through a real lighthouse; one is killed in mid-round and comes back.

The journal is fed piece by piece, so that what happens does not depend on how fast the machine is. What comes out
is compared with one process that follows the same schedule, written out.
"""

from __future__ import annotations

import copy
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from hintloop.learner.batch import BatchRules, build_step
from hintloop.learner.config import LearnerConfig
from hintloop.learner.models import SideWeights, load_model, make_optimizer
from hintloop.learner.ranks import Trained
from hintloop.learner.replicas.lighthouse import open_lighthouse
from hintloop.learner.trainer import ThreeChannelTrainer
from hintloop.replay.episode import Episode
from hintloop.replay.journal import Journal
from hintloop.replay.weights import WeightStore

from ..learner.factory import make_groups

pytest.importorskip("torchft", reason="needs torchft, of the extra replicas")

COUNT, VICTIM = 3, 1
ROUNDS, SYNC_EVERY = 4, 2
DEADLINE_S = 600
SETTINGS = LearnerConfig(
    steps=ROUNDS * SYNC_EVERY,
    groups_per_step=1,
    micro_batches=1,
    max_staleness=None,
    grad_norm_every=0,
    idle_timeout_s=DEADLINE_S,
)
OUTER = {"outer_lr": 0.6, "outer_momentum": 0.8}


class Run:
    """Three learners on one journal and one weight store."""

    def __init__(self, folder: Path, lighthouse: str) -> None:
        self.folder, self._lighthouse = folder, lighthouse
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        self._writer = Journal(folder / "journal").writer("recorded")

    def start(self, index: int) -> None:
        """Start a replica, or start it again."""
        settings = SETTINGS.model_dump(mode="json", exclude_unset=True)
        settings["max_staleness"] = "none"
        assignments = [f"learner.{key}={value}" for key, value in settings.items()]
        assignments += ["rollout.groups_per_step=1", f"replicas.sync_every={SYNC_EVERY}"]
        assignments += [f"replicas.{key}={value}" for key, value in OUTER.items()]
        options = ["--replicas", str(COUNT), "--replica", str(index), "--lighthouse", self._lighthouse]
        command = [sys.executable, "-m", "hintloop.cli.main", "learn", "--run", str(self.folder), "--follow"]
        with (self.folder / f"{index}.log").open("ab") as log:
            self.processes[index] = subprocess.Popen(
                [*command, *options, *(word for a in assignments for word in ("--set", a))],
                env={**os.environ, "OMP_NUM_THREADS": "1", "RUST_LOG": "error"},
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
            )

    def feed(self, groups: list[list[Episode]]) -> None:
        """Append groups to the journal, one segment each."""
        for group in groups:
            self._writer.append(group)

    def lines(self, index: int, name: str) -> list[dict[str, Any]]:
        """Records of a replica."""
        path = self.folder / f"replica-{index}" / name
        if not path.exists():
            return []
        text = path.read_text()
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]

    def wait(self, what: str, true: Callable[[int], bool], *indices: int) -> None:
        """Until something is true of all these replicas."""
        deadline = time.monotonic() + DEADLINE_S
        while not all(true(index) for index in indices):
            ended = [i for i in indices if self.processes[i].poll() is not None]
            if ended or time.monotonic() > deadline:
                logs = "\n".join((self.folder / f"{i}.log").read_text()[-3000:] for i in indices)
                pytest.fail(f"{what}: {f'{ended} ended' if ended else 'not in time'}\n{logs}")
            time.sleep(0.05)

    def is_waiting(self, what: str, step: int) -> Callable[[int], bool]:
        """Whether a replica that runs now waits for something after a step."""

        def true(index: int) -> bool:
            path = self.folder / f"replica-{index}" / "status" / "learner.json"
            status = json.loads(path.read_text()) if path.exists() else {}
            mine = status.get("pid") == self.processes[index].pid
            return mine and status["state"] == f"waiting for {what}" and status["step"] == step

        return true


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    with open_lighthouse(min_replicas=2, join_timeout_s=DEADLINE_S) as url:
        run = Run(tmp_path, url)
        yield run
        for process in run.processes.values():
            process.kill()
            process.wait()


def play(run: Run, groups: list[list[Episode]]) -> None:
    """Everybody trains a round and half of the next; one dies; the others complete it and go on; it comes back."""
    everyone, survivors = tuple(range(COUNT)), tuple(i for i in range(COUNT) if i != VICTIM)
    for index in everyone:
        run.start(index)
    run.wait("start", run.is_waiting("episodes", 0), *everyone)
    run.feed(groups[:9])
    run.wait("half of the second round", run.is_waiting("episodes", 3), *everyone)
    run.processes[VICTIM].send_signal(signal.SIGKILL)
    run.processes[VICTIM].wait()
    run.feed(groups[9:12])
    run.wait("the second round and what the dead one had", run.is_waiting("episodes", 5), *survivors)
    run.start(VICTIM)
    run.wait("return", run.is_waiting("the other replicas", 3), VICTIM)
    run.feed(groups[12:])
    for index in everyone:
        code = run.processes[index].wait(DEADLINE_S)
        assert code == 0, (run.folder / f"{index}.log").read_text()[-3000:]


def reference(run: Run, groups: list[list[Episode]]) -> dict[str, torch.Tensor]:
    """What one process makes of the schedule that the replicas recorded."""
    by_id = {group[0].group_id: group for group in groups}
    student = Path(str(resources.files("hintloop.agent") / "student" / "student-tiny"))
    learners = [Single(student) for _ in range(COUNT)]
    shared = [p.detach().clone() for p in learners[0].model.parameters()]
    outer = torch.optim.SGD(shared, lr=OUTER["outer_lr"], momentum=OUTER["outer_momentum"], nesterov=True)
    averages = [{a["step"]: a for a in run.lines(i, "metrics/outer.jsonl")} for i in range(COUNT)]
    trained = [{t["step"]: t["groups"] for t in run.lines(i, "trained.jsonl")} for i in range(COUNT)]
    for number in range(ROUNDS):
        first, last = number * SYNC_EVERY + 1, (number + 1) * SYNC_EVERY
        average = averages[0][last]
        for index in average["contributors"]:
            for step in range(first, last + 1):
                learners[index].step([by_id[g] for g in trained[index][step]], step, number)
        parts = [list(learners[index].model.parameters()) for index in average["contributors"]]
        for value, *locals_ in zip(shared, *parts, strict=True):
            value.grad = value - torch.stack([p.detach() for p in locals_]).mean(0)
        outer.step()
        for index in average["members"]:
            donor = averages[index][last]["healed_from"]
            if donor is not None:
                learners[index].take_over(learners[donor])
        for index in average["members"]:
            learners[index].end_round(shared)
    return {name: p.detach() for name, p in learners[0].model.named_parameters()}


class Single:
    """One replica's inner training, in this process."""

    def __init__(self, student: Path) -> None:
        self.model = load_model(student)
        self._side = SideWeights.of(self.model, SETTINGS)
        self._tokenizer = AutoTokenizer.from_pretrained(student)
        assert self._side.teacher is not None, "an average by default"
        self._teacher = self._side.teacher
        self._trained = Trained(self.model, make_optimizer(self.model, SETTINGS), self._teacher)

    def step(self, groups: list[list[Episode]], step: int, version: int) -> None:
        """One step on some groups."""
        rules = BatchRules(vocabulary=self.model.config.vocab_size)
        batch = build_step(groups, rules, version=version, seed=(SETTINGS.seed, step - 1))
        self._average_before = copy.deepcopy(self._teacher)
        ThreeChannelTrainer(
            self.model,
            self._tokenizer,
            SETTINGS,
            [batch],
            side=self._side,
            optimizer=self._trained.optimizer,
            output_dir=Path("unused"),
        ).train()

    def take_over(self, donor: Single) -> None:
        """Continue as another replica would."""
        self._trained.load(copy.deepcopy(donor._trained.state()))
        self._average_before = copy.deepcopy(donor._average_before)

    def end_round(self, shared: list[torch.Tensor]) -> None:
        """Go on from what all have; the last step's moving average follows that."""
        for parameter, value in zip(self.model.parameters(), shared, strict=True):
            parameter.data.copy_(value)
        for name, mean in self._teacher.items():
            mean.copy_(self._average_before[name])
            mean.lerp_(self.model.get_parameter(name).detach(), SETTINGS.teacher_rate)


@pytest.mark.slow
def test_a_replica_that_is_killed_comes_back_and_all_end_where_one_process_would(run: Run) -> None:
    groups = make_groups(20, 2, sites=1, pairs=1)
    play(run, groups)
    outer = [run.lines(index, "metrics/outer.jsonl") for index in range(COUNT)]
    assert [a["contributors"] for a in outer[0]] == [[0, 1, 2], [0, 2], [0, 2], [0, 1, 2]]
    assert [a["members"] for a in outer[0]] == [[0, 1, 2], [0, 2], [0, 1, 2], [0, 1, 2]]
    assert all(a["committed"] for averages in outer for a in averages)
    assert [a["healed_from"] for a in outer[VICTIM]] == [None, outer[VICTIM][1]["healed_from"], None]
    assert outer[VICTIM][1]["healed_from"] in (0, 2)

    taken = [g for i in range(COUNT) for t in run.lines(i, "trained.jsonl") for g in t["groups"]]
    assert sorted(taken) == sorted(group[0].group_id for group in groups), "each group once"

    store = WeightStore(run.folder / "weights")
    assert store.versions() == [1, 2, 3, 4]
    assert [store.manifest(v).metadata["final"] for v in store.versions()] == [False, False, False, True]
    published = load_file(store.fetch(ROUNDS, run.folder / "cache") / "model.safetensors")
    expected = reference(run, groups)
    for index in range(COUNT):
        checkpoint = run.folder / f"replica-{index}" / "checkpoints" / f"v{ROUNDS:06d}"
        found = load_file(checkpoint / "model" / "model.safetensors")
        assert all(value.equal(published[name]) for name, value in found.items())
    for name, value in published.items():
        torch.testing.assert_close(value, expected[name], atol=1e-6, rtol=0)
