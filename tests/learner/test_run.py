"""The loop as a whole: what is published, what is on disk, and that a crash changes nothing."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file
from transformers import AutoTokenizer

from hintloop.learner import checkpoint as checkpoints
from hintloop.learner.config import LearnerConfig
from hintloop.learner.models import load_model, probe
from hintloop.learner.run import LearnerSummary, run_learner
from hintloop.replay.episode import Outcome
from hintloop.replay.journal import Journal
from hintloop.replay.weights import WeightStore

from .factory import make_groups, save_student

SETTINGS = LearnerConfig(steps=8, groups_per_step=2, micro_batches=2, grad_norm_every=3, max_staleness=None)
SUICIDE = """
import os, signal, sys, threading, time
from pathlib import Path
from hintloop.learner.config import LearnerConfig
from hintloop.learner.run import run_learner

student, journal, weights, run, config, step, delay = sys.argv[1:]


def kill():
    metrics = Path(run, "metrics", "learner.jsonl")
    while not metrics.exists() or len(metrics.read_text().splitlines()) < int(step):
        time.sleep(0.005)
    time.sleep(float(delay))
    os.kill(os.getpid(), signal.SIGKILL)


threading.Thread(target=kill, daemon=True).start()
settings = LearnerConfig.model_validate_json(config)
run_learner(Path(student), journal, weights, Path(run), settings, follow=False)
"""
"""A learner that kills itself a moment after a step: whoever watches it from outside may be too slow for that."""


@pytest.fixture
def student(tmp_path: Path) -> Path:
    return save_student(tmp_path / "student")


def journal(tmp_path: Path, groups: int, per_segment: int = 1) -> Journal:
    made = Journal(tmp_path / "journal")
    writer = made.writer("w")
    all_groups = make_groups(groups, 3, sites=1, pairs=1)
    for start in range(0, groups, per_segment):
        writer.append([e for group in all_groups[start : start + per_segment] for e in group])
    return made


def learn(tmp_path: Path, name: str, *, follow: bool = False, **changes: Any) -> LearnerSummary:
    return run_learner(
        tmp_path / "student",
        str(tmp_path / "journal"),
        str(tmp_path / f"{name}-weights"),
        tmp_path / name,
        SETTINGS.model_copy(update=changes),
        follow=follow,
    )


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def weights(tmp_path: Path, name: str) -> dict[str, torch.Tensor]:
    store = WeightStore(tmp_path / f"{name}-weights")
    latest = store.latest()
    assert latest is not None
    return load_file(store.fetch(latest.version, tmp_path / f"{name}-cache") / "model.safetensors")


def test_a_recorded_journal_is_trained_once_and_the_last_version_is_final(
    student: Path, tmp_path: Path
) -> None:
    journal(tmp_path, 5)
    summary = learn(tmp_path, "run")
    assert (summary.step, summary.version, summary.episodes, summary.reason) == (3, 3, 15, "journal_end")
    store = WeightStore(tmp_path / "run-weights")
    assert [store.manifest(v).metadata["final"] for v in store.versions()] == [False, False, False, True]
    trained = lines(tmp_path / "run" / "trained.jsonl")
    assert [record["groups"] for record in trained] == [["g0", "g1"], ["g2", "g3"], ["g4"]]
    metrics = lines(tmp_path / "run" / "metrics" / "learner.jsonl")
    assert [m["step"] for m in metrics] == [1, 2, 3]
    assert {"loss_grpo", "loss_sdpo", "loss_dpo", "grad_norm", "grad_norm_dpo", "reward_mean"} <= metrics[
        0
    ].keys()
    assert {"seconds_waiting", "seconds_training", "seconds_publishing", "clip_fraction_low"} <= metrics[
        0
    ].keys()
    status = json.loads((tmp_path / "run" / "status" / "learner.json").read_text())
    assert (status["state"], status["step"], status["version"]) == ("ended: journal_end", 3, 3)
    assert learn(tmp_path, "run") == replace(summary, seconds=pytest.approx(0, abs=60))
    assert store.versions() == [0, 1, 2, 3]


def test_a_published_version_is_a_loadable_model_that_passes_its_own_probe(
    student: Path, tmp_path: Path
) -> None:
    journal(tmp_path, 2)
    learn(tmp_path, "run")
    store = WeightStore(tmp_path / "run-weights")
    for version in (0, 1):
        folder = store.fetch(version, tmp_path / "cache")
        model = load_model(folder)
        expected = store.manifest(version).metadata["probe"]
        ids = torch.tensor([[int(i) for i in expected["token_ids"]]])
        found = torch.log_softmax(model(input_ids=ids).logits[0, :-1], -1).gather(1, ids[0, 1:, None])[:, 0]
        assert found.tolist() == pytest.approx(expected["logprobs"], abs=1e-5)
        assert AutoTokenizer.from_pretrained(folder)("w5").input_ids == [5]
    start = load_file(student / "model.safetensors")
    published = load_file(store.fetch(0, tmp_path / "cache") / "model.safetensors")
    assert all(published[name].equal(start[name]) for name in start)
    assert probe(load_model(student)) == store.manifest(0).metadata["probe"]


def test_a_killed_learner_ends_with_the_very_weights_of_an_undisturbed_one(
    student: Path, tmp_path: Path
) -> None:
    journal(tmp_path, 16, per_segment=3)
    learn(tmp_path, "whole")
    step, delay = random.randrange(1, 4), random.random() * 0.1
    arguments = [str(tmp_path / n) for n in ("student", "journal", "killed-weights", "killed")]
    killed = subprocess.run(
        [sys.executable, "-c", SUICIDE, *arguments, SETTINGS.model_dump_json(), str(step), str(delay)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        stderr=subprocess.DEVNULL,
        timeout=300,
        check=False,
    )
    assert killed.returncode == -signal.SIGKILL, "it ended before it could be killed"
    summary = learn(tmp_path, "killed")
    assert (summary.step, summary.version, summary.episodes) == (8, 8, 48)
    assert lines(tmp_path / "killed" / "trained.jsonl") == lines(tmp_path / "whole" / "trained.jsonl")
    one, two = weights(tmp_path, "whole"), weights(tmp_path, "killed")
    assert all(one[name].equal(two[name]) for name in one), f"killed {delay:.3f} s after step {step}"
    losses = [
        [
            (m["step"], m["version"], m["grad_norm"], m["loss_sdpo"])
            for m in lines(tmp_path / n / "metrics" / "learner.jsonl")
        ]
        for n in ("whole", "killed")
    ]
    assert losses[0] == losses[1]


def test_a_checkpoint_that_was_not_published_is_published_on_restart(student: Path, tmp_path: Path) -> None:
    journal(tmp_path, 6)
    learn(tmp_path, "run", steps=2)
    found = checkpoints.newest(tmp_path / "run" / "checkpoints")
    assert found is not None
    lost = WeightStore(tmp_path / "run-weights")
    lost._store.remove("v000002")
    lost._store.replace("LATEST", b"v000001\n")
    metrics = tmp_path / "run" / "metrics" / "learner.jsonl"
    metrics.write_text(metrics.read_text() + '{"step": 3}\n{"st')
    learn(tmp_path, "run", steps=2)
    assert lost.versions() == [0, 1, 2]
    assert lost.manifest(2).metadata == found.state.metadata
    assert [m["step"] for m in lines(metrics)] == [1, 2]


def test_weights_of_another_run_are_refused(student: Path, tmp_path: Path) -> None:
    journal(tmp_path, 2)
    WeightStore(tmp_path / "run-weights").publish(4, student, metadata={})
    with pytest.raises(ValueError, match="another weight store"):
        learn(tmp_path, "run")


def test_publishing_less_often_checkpoints_less_often_and_still_ends_with_a_final_version(
    student: Path, tmp_path: Path
) -> None:
    journal(tmp_path, 10)
    summary = learn(tmp_path, "run", publish_every=2, keep_versions=2)
    assert (summary.step, summary.version) == (5, 5)
    store = WeightStore(tmp_path / "run-weights")
    assert store.versions() == [4, 5]
    assert store.manifest(5).metadata["final"]


def test_a_step_with_nothing_to_learn_is_a_version_all_the_same(student: Path, tmp_path: Path) -> None:
    (group,) = make_groups(1, 2)
    Journal(tmp_path / "journal").writer("w").append(
        [replace(e, reward=None, outcome=Outcome.INFRA_ERROR) for e in group]
    )
    assert learn(tmp_path, "run").version == 1
    start = load_file(student / "model.safetensors")
    assert all(tensor.equal(start[name]) for name, tensor in weights(tmp_path, "run").items())


def test_a_live_learner_that_gets_nothing_gives_up_and_says_so(student: Path, tmp_path: Path) -> None:
    journal(tmp_path, 2)
    summary = learn(tmp_path, "run", follow=True, idle_timeout_s=0.3)
    assert (summary.reason, summary.step, summary.version) == ("idle", 1, 1)
    assert not WeightStore(tmp_path / "run-weights").manifest(1).metadata["final"]
    more = make_groups(4, 3)[2:]
    writer = Journal(tmp_path / "journal").writer("w")
    for group in more:
        writer.append(group)
    summary = learn(tmp_path, "run", follow=True, idle_timeout_s=0.3, steps=2)
    assert (summary.reason, summary.step, summary.version) == ("steps", 2, 2)
    assert WeightStore(tmp_path / "run-weights").manifest(2).metadata["final"]


def test_a_finished_run_that_gets_more_steps_says_at_once_that_it_goes_on(
    student: Path, tmp_path: Path
) -> None:
    journal(tmp_path, 6)
    store = WeightStore(tmp_path / "run-weights")
    assert learn(tmp_path, "run", follow=True, steps=1).version == 1
    assert store.manifest(1).metadata["final"]
    assert learn(tmp_path, "run", follow=True, steps=3).version == 4
    assert [store.manifest(version).metadata["final"] for version in (2, 3, 4)] == [False, False, True]
    assert [store.manifest(version).metadata["step"] for version in (1, 2, 3, 4)] == [1, 1, 2, 3]


def test_the_last_version_may_be_the_moving_average_which_changes_no_training(
    student: Path, tmp_path: Path
) -> None:
    journal(tmp_path, 6)
    learn(tmp_path, "plain", steps=3)
    learn(tmp_path, "run", steps=2, average_last=True)
    assert weights(tmp_path, "run").keys() == weights(tmp_path, "plain").keys()
    learn(tmp_path, "run", steps=3, average_last=True)
    newest = checkpoints.newest(tmp_path / "run" / "checkpoints")
    assert newest is not None
    assert newest.published != newest.model
    raw, average = (load_file(folder / "model.safetensors") for folder in (newest.model, newest.published))
    last, teacher = weights(tmp_path, "run"), load_file(newest.folder / "teacher.safetensors")
    assert all(raw[name].equal(value) for name, value in weights(tmp_path, "plain").items())
    assert all(average[name].equal(value) for name, value in last.items())
    assert all(value.equal(last[name]) for name, value in teacher.items() if name in last)
    assert not all(raw[name].equal(value) for name, value in last.items())


def test_an_average_that_does_not_exist_cannot_be_published() -> None:
    with pytest.raises(ValidationError, match="needs the moving average"):
        LearnerConfig(average_last=True, teacher="live")


def test_sigterm_ends_a_waiting_learner_which_may_go_on_later(student: Path, tmp_path: Path) -> None:
    journal(tmp_path, 2)
    status = tmp_path / "run" / "status" / "learner.json"

    def terminate_when_waiting() -> None:
        deadline = time.monotonic() + 300
        while time.monotonic() < deadline:
            if status.exists() and "waiting" in status.read_text():
                os.kill(os.getpid(), signal.SIGTERM)
                return
            time.sleep(0.02)

    thread = threading.Thread(target=terminate_when_waiting)
    thread.start()
    summary = learn(tmp_path, "run", follow=True)
    thread.join()
    assert (summary.reason, summary.step, summary.version) == ("signal", 1, 1)
    assert not WeightStore(tmp_path / "run-weights").manifest(1).metadata["final"]


def test_the_time_limit_holds_over_restarts(student: Path, tmp_path: Path) -> None:
    journal(tmp_path, 8)
    assert learn(tmp_path, "run", steps=1).reason == "steps"
    summary = learn(tmp_path, "run", max_minutes=1e-9)
    assert (summary.reason, summary.step) == ("max_minutes", 1)


def test_every_setting_is_described_and_unknown_ones_are_refused() -> None:
    assert all(field.description for field in LearnerConfig.model_fields.values())
    with pytest.raises(ValueError, match="extra"):
        LearnerConfig.model_validate({"step": 3})
