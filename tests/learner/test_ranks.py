"""Several processes make the very step that one makes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hintloop.learner import checkpoint as checkpoints
from hintloop.learner.arguments import trl_arguments
from hintloop.learner.config import LearnerConfig
from hintloop.learner.replicas.config import ReplicasConfig
from hintloop.learner.run import run_learner
from hintloop.replay.journal import Journal

from .factory import make_groups
from .processes import TESTS, launch
from .ranks import CASES, steps


def test_two_processes_make_the_step_of_one(tmp_path: Path, one_thread: None) -> None:
    launch("learner.ranks", str(tmp_path / "two.pt"), *CASES, folder=TESTS)
    both = torch.load(tmp_path / "two.pt", weights_only=True)
    for case in CASES:
        one, two = steps(case, tmp_path / "trainer"), both[case]
        for before, after in zip(one["gradients"], two["gradients"], strict=True):
            assert before.norm() > 1e-3
            assert (before - after).norm() < 1e-5 * max(1.0, float(before.norm()))
        for name, weight in one["weights"].items():
            torch.testing.assert_close(two["weights"][name], weight, atol=1e-5, rtol=0)
        for before, after in zip(one["metrics"], two["metrics"], strict=True):
            assert after == pytest.approx(before, rel=1e-4, abs=1e-6)


def test_processes_that_cannot_share_the_micro_batches_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="2 processes cannot share 3 micro-batches evenly"):
        trl_arguments(LearnerConfig(micro_batches=3), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [None, ReplicasConfig(count=1, rounds="rounds", sync_every=2)])
def test_a_launched_learner_makes_the_steps_of_one_process_and_goes_on_in_another_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replicas: ReplicasConfig | None
) -> None:
    """Two processes make two steps; one goes on from there, and ends where one alone ends."""
    monkeypatch.chdir(tmp_path)
    writer = Journal("journal").writer("w")
    for group in make_groups(8, 3, sites=1, pairs=1, logprob=-5.0):
        writer.append(group)
    settings = {"groups_per_step": 2, "micro_batches": 2, "grad_norm_every": 2, "seed": 3}
    words = [f"learner.{key}={value}" for key, value in {**settings, "steps": 2}.items()]
    if replicas:
        words += [f"replicas.{key}={value}" for key, value in replicas.model_dump(exclude_unset=True).items()]
    learn = ["hintloop.cli.main", "learn", "--run", "two", "--journal", "journal", "--json"]
    summary = json.loads(
        launch(*learn, *(each for word in words for each in ("--set", word)), folder=tmp_path)
    )
    assert (summary["step"], summary["reason"]) == (2, "steps")
    two, one = Path(summary["folder"]), Path("one")
    for folder, rounds in ((two, "rounds"), (one, "other-rounds")):
        run_learner(
            two / "student",
            "journal",
            "two/weights" if folder == two else "one/weights",
            folder,
            LearnerConfig(steps=4, **settings),
            follow=False,
            replicas=replicas and replicas.model_copy(update={"rounds": rounds}),
        )
    found, expected = newest_weights(two), newest_weights(one)
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, atol=1e-5, rtol=0)
    both = [(folder / "metrics" / "learner.jsonl").read_text().splitlines() for folder in (two, one)]
    for ours, alone in zip(*both, strict=True):
        mine, other = json.loads(ours), json.loads(alone)
        assert mine.keys() == other.keys()
        for key in other.keys() - {"time", "seconds_waiting", "seconds_training", "seconds_publishing"}:
            assert mine[key] == pytest.approx(other[key], rel=1e-3, abs=1e-5), key


def newest_weights(folder: Path) -> dict[str, torch.Tensor]:
    found = checkpoints.newest(folder / "checkpoints")
    assert found is not None
    return load_file(found.model / "model.safetensors")
