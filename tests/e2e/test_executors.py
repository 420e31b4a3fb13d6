"""All replicas of a learner by one command: real processes that train on a recorded journal and meet in a folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from hintloop.replay.journal import Journal
from hintloop.replay.weights import WeightStore

from ..learner.factory import make_groups

pytest.importorskip("torchft", reason="needs torchft, of the extra replicas")

COUNT, GROUPS, SYNC_EVERY = 2, 8, 2
DEADLINE_S = 900
SETTINGS = {
    "learner.steps": GROUPS // COUNT,
    "learner.groups_per_step": 1,
    "learner.micro_batches": 1,
    "learner.grad_norm_every": 0,
    "replicas.sync_every": SYNC_EVERY,
}


def learn(run: Path) -> tuple[int, list[dict[str, Any]], str]:
    """Run the command; its exit code, what it said of each replica, and its progress."""
    options = ["--replicas", str(COUNT), "--executor", "local", "--rounds", f"file://{run}/rounds", "--json"]
    assignments = [word for key, value in SETTINGS.items() for word in ("--set", f"{key}={value}")]
    ended = subprocess.run(
        [sys.executable, "-m", "hintloop.cli.main", "learn", "--run", str(run), *options, *assignments],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    return ended.returncode, json.loads(ended.stdout), ended.stderr


@pytest.mark.slow
def test_two_replicas_are_launched_train_and_end_with_the_same_weights(tmp_path: Path) -> None:
    groups = make_groups(GROUPS, 2, sites=1, pairs=1)
    writer = Journal(tmp_path / "journal").writer("recorded")
    for group in groups:
        writer.append(group)
    code, results, progress = learn(tmp_path)
    assert code == 0, progress
    assert [result["state"] for result in results] == ["succeeded"] * COUNT
    folders = [tmp_path / f"replica-{index}" for index in range(COUNT)]
    for index in range(COUNT):
        assert f"replica {index} | learner ended (steps) after step {GROUPS // COUNT}: version 2" in progress
    lines = [json.loads(line) for f in folders for line in (f / "trained.jsonl").read_text().splitlines()]
    taken = sorted(group for line in lines for group in line["groups"])
    assert taken == sorted(group[0].group_id for group in groups), "each group once"
    store = WeightStore(tmp_path / "weights")
    assert store.versions() == [0, 1, 2]
    published = load_file(store.fetch(2, tmp_path / "cache") / "model.safetensors")
    for folder in folders:
        found = load_file(folder / "checkpoints" / "v000002" / "model" / "model.safetensors")
        assert all(value.equal(published[name]) for name, value in found.items())
