"""Three learners that meet through a real lighthouse; one is killed in mid-round and comes back.

The journal is fed piece by piece, so that what happens does not depend on how fast the machine is. What comes out
is compared with one process that follows the same schedule, written out.
"""

from __future__ import annotations

import copy
import json
import multiprocessing
import re
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from importlib import resources
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from hintloop.cli.main import run_command
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
EVERYONE = tuple(range(COUNT))
SURVIVORS = tuple(index for index in EVERYONE if index != VICTIM)
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
STREAMING = {
    "learner.steps": 16,
    "replicas.sync_every": 4,
    "replicas.fragments": 2,
    "replicas.fragment_sync_delay": 1,
    "replicas.fragment_update_alpha": 0.25,
}
"""Every second step a fragment is sent, and at the next step its average is waited for."""
ASKED = re.compile(r"\[(\d+)/\d+ participants healthy\]")
FORKED = multiprocessing.get_context("forkserver")
"""Learners are forks of one process that has the libraries: to import them takes each longer than all that it does."""
FORKED.set_forkserver_preload(["hintloop.cli.main", "hintloop.learner.run", "hintloop.learner.replicas.live"])


class Run:
    """Three learners on one journal and one weight store."""

    def __init__(self, folder: Path, lighthouse: str) -> None:
        self.folder, self.lighthouse = folder, lighthouse
        self.processes: dict[int, ForkServerProcess] = {}
        self._writer = Journal(folder / "journal").writer("recorded")

    def start(self, index: int, changes: dict[str, float] | None = None) -> None:
        """Start a replica, or start it again; ``changes`` are settings of its own."""
        settings = SETTINGS.model_dump(mode="json", exclude_unset=True)
        settings["max_staleness"] = "none"
        every = {f"learner.{key}": value for key, value in settings.items()}
        every |= {"rollout.groups_per_step": 1, "replicas.sync_every": SYNC_EVERY}
        every |= {f"replicas.{key}": value for key, value in OUTER.items()} | (changes or {})
        assignments = [f"{key}={value}" for key, value in every.items()]
        options = ["--replicas", str(COUNT), "--replica", str(index), "--lighthouse", self.lighthouse]
        options += [word for assignment in assignments for word in ("--set", assignment)]
        words = ["learn", "--run", str(self.folder), "--follow", *options]
        self.processes[index] = FORKED.Process(target=run_command, args=(words,), daemon=True)
        self.processes[index].start()

    def kill(self, index: int) -> None:
        """SIGKILL."""
        self.processes[index].kill()
        self.processes[index].join()

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
            ended = [i for i in indices if not self.processes[i].is_alive()]
            assert not ended, f"{what}: {ended} ended"
            assert time.monotonic() < deadline, f"{what}: not in time"
            time.sleep(0.05)

    def wait_return(self, step: int) -> None:
        """Until the replica that was dead has asked the lighthouse, the only one so far, for the others.

        What it says itself it says before: others that ask while its question is on its way leave it out.
        """
        self.wait("return", self.is_waiting("the other replicas", step), VICTIM)
        self.wait("question", lambda _: self._have_asked() == 1, VICTIM)

    def _have_asked(self) -> int:
        with urllib.request.urlopen(f"{self.lighthouse}/status", timeout=60) as page:
            found = ASKED.search(page.read().decode())
        assert found, "the lighthouse says how many replicas wait for a quorum"
        return int(found[1])

    def end(self) -> None:
        """Until all have done all steps."""
        for index in EVERYONE:
            self.processes[index].join(DEADLINE_S)
            assert self.processes[index].exitcode == 0
            assert self._status(index)["state"] == "ended: steps"

    def is_waiting(self, what: str, step: int) -> Callable[[int], bool]:
        """Whether a replica that runs now waits for something after that many steps or more."""

        def true(index: int) -> bool:
            status = self._status(index)
            mine = status.get("pid") == self.processes[index].pid
            return mine and status["state"] == f"waiting for {what}" and status["step"] >= step

        return true

    def _status(self, index: int) -> dict[str, Any]:
        path = self.folder / f"replica-{index}" / "status" / "learner.json"
        return json.loads(path.read_text()) if path.exists() else {}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    for name, value in {"OMP_NUM_THREADS": "1", "RUST_LOG": "error"}.items():
        monkeypatch.setenv(name, value)
    with open_lighthouse(min_replicas=2, join_timeout_s=DEADLINE_S) as url:
        run = Run(tmp_path, url)
        yield run
        for index in run.processes:
            run.kill(index)


def play(run: Run, groups: list[list[Episode]]) -> None:
    """Everybody trains a round and half of the next; one dies; the others complete it and go on; it comes back."""
    for index in EVERYONE:
        run.start(index)
    run.wait("start", run.is_waiting("episodes", 0), *EVERYONE)
    run.feed(groups[:9])
    run.wait("half of the second round", run.is_waiting("episodes", 3), *EVERYONE)
    run.kill(VICTIM)
    run.feed(groups[9:12])
    run.wait("the second round and what the dead one had", run.is_waiting("episodes", 5), *SURVIVORS)
    run.start(VICTIM)
    run.wait_return(3)
    run.feed(groups[12:])
    run.end()


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


@pytest.mark.slow
def test_a_replica_that_is_killed_with_a_fragment_on_its_way_comes_back_and_all_have_the_same(
    run: Run,
) -> None:
    groups = make_groups(48, 2, sites=1, pairs=1)
    for index in EVERYONE:
        run.start(index, STREAMING)
    run.wait("start", run.is_waiting("episodes", 0), *EVERYONE)
    run.feed(groups[:15])
    run.wait("a fragment on its way", run.is_waiting("episodes", 5), *EVERYONE)
    run.kill(VICTIM)
    sent = run.lines(VICTIM, "trained.jsonl")[4]["groups"]
    run.feed(groups[15:23])
    run.wait("another round", run.is_waiting("episodes", 8), *SURVIVORS)
    run.start(VICTIM, STREAMING)
    run.wait_return(4)
    run.feed(groups[23:])
    run.end()

    outer = [run.lines(index, "metrics/outer.jsonl") for index in range(COUNT)]
    assert outer[0][-1]["contributors"] == [0, 1, 2]
    assert [a["healed_from"] in SURVIVORS for a in outer[VICTIM]].count(True) == 1
    assert all(a["healed_from"] is None for index in SURVIVORS for a in outer[index])
    store = WeightStore(run.folder / "weights")
    assert store.versions() == [1, 2, 3, 4]
    published = load_file(store.fetch(4, run.folder / "cache") / "model.safetensors")
    for index in EVERYONE:
        common = run.folder / f"replica-{index}" / "checkpoints" / "v000004" / "published"
        found = load_file(common / "model.safetensors")
        assert found.keys() == published.keys()
        assert all(value.equal(published[name]) for name, value in found.items())
    taken = [g for i in range(COUNT) for t in run.lines(i, "trained.jsonl") for g in t["groups"]]
    names = [group[0].group_id for group in groups]
    assert {*taken, *sent} == set(names[: len({*taken, *sent})]), "none is left out"
    twice = {name for name, times in Counter(taken).items() if times > 1}
    assert twice <= set(names[9:12]), "only what was taken while the average before was on its way"
