"""Processes that hold a part of the model each make the very step that one process makes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hintloop.learner import checkpoint as checkpoints
from hintloop.learner.config import LearnerConfig
from hintloop.learner.replicas.config import ReplicasConfig
from hintloop.learner.run import run_learner
from hintloop.replay.journal import Journal

from .factory import make_groups, save_student
from .processes import TESTS, launch
from .shards import CASES, steps


def test_processes_with_half_of_the_model_each_make_the_steps_of_one(
    tmp_path: Path, one_thread: None
) -> None:
    """On uneven micro-batches: what one of the processes lacks, the other has."""
    launch("learner.shards", str(tmp_path), *CASES, folder=TESTS)
    both = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2)]
    for case in CASES:
        one = steps(case, tmp_path / "trainer")
        for part in (ranks[case] for ranks in both):
            assert part["held"] * 2 == one["held"], case
            for before, after in zip(one["gradients"], part["gradients"], strict=True):
                assert before.norm() > 1e-3
                assert (before - after).norm() < 1e-5, case
            for kind in ("weights", "teacher"):
                assert part[kind].keys() == one[kind].keys()
                for name, weight in one[kind].items():
                    torch.testing.assert_close(part[kind][name], weight, atol=1e-5, rtol=0)
            for before, after in zip(one["metrics"], part["metrics"], strict=True):
                assert after == pytest.approx(before, rel=1e-4, abs=1e-6), case


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 2])
def test_a_sharded_run_goes_on_in_one_process_and_in_two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    """Two processes make two steps, two make a third, one makes a fourth, and ends where one alone ends."""
    monkeypatch.chdir(tmp_path)
    writer = Journal("journal").writer("w")
    for group in make_groups(8, 3, sites=1, pairs=1, logprob=-5.0):
        writer.append(group)
    settings = {"groups_per_step": 2, "micro_batches": 2, "seed": 3, "lora_rank": rank}
    words = [f"learner.{key}={value}" for key, value in {**settings, "sharded": "true"}.items()]
    for count in (2, 3):
        sets = [each for word in (*words, f"learner.steps={count}") for each in ("--set", word)]
        learn = ["learn", "--run", "two", "--journal", "journal", "--json", *sets]
        summary = json.loads(launch("hintloop.cli.main", *learn, folder=tmp_path))
        assert (summary["step"], summary["reason"]) == (count, "steps")
    two, one = Path(summary["folder"]), Path("one")
    for folder, weights in ((two, "two/weights"), (one, "one/weights")):
        config = LearnerConfig(steps=4, **settings)  # type: ignore[arg-type]
        run_learner(two / "student", "journal", weights, folder, config, follow=False)
    found, expected = newest(two), newest(one)
    for file in ("model/model.safetensors", "teacher.safetensors"):
        ours, theirs = load_file(found / file), load_file(expected / file)
        assert ours.keys() == theirs.keys()
        for name, weight in theirs.items():
            torch.testing.assert_close(ours[name], weight, atol=1e-5, rtol=0)


def newest(folder: Path) -> Path:
    found = checkpoints.newest(folder / "checkpoints")
    assert found is not None
    return found.folder


def test_replicas_do_not_shard(tmp_path: Path) -> None:
    Journal(str(tmp_path / "journal")).writer("w").append(make_groups(1, 2)[0])
    with pytest.raises(ValueError, match="replicas average whole models"):
        run_learner(
            save_student(tmp_path / "student"),
            str(tmp_path / "journal"),
            str(tmp_path / "weights"),
            tmp_path / "run",
            LearnerConfig(steps=2, sharded=True),
            follow=False,
            replicas=ReplicasConfig(count=1, rounds=str(tmp_path / "rounds"), sync_every=2),
        )
