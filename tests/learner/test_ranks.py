"""Several processes make the very step that one makes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hintloop.learner.arguments import trl_arguments
from hintloop.learner.config import LearnerConfig

from .ranks import steps

TESTS = Path(__file__).parents[1]
DEADLINE_S = 240
LOSSES = ("dapo", "grpo")


def run_ranks(out: Path, count: int) -> list[tuple[int, str]]:
    """Start ``count`` processes that find each other over loopback; exit code and output of each."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(count)}
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "learner.ranks", str(out), *LOSSES],
            cwd=TESTS,
            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank), "ACCELERATE_USE_CPU": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(count)
    ]
    try:
        outputs = [process.communicate(timeout=DEADLINE_S)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    return [(process.returncode, output) for process, output in zip(started, outputs, strict=True)]


def test_two_processes_make_the_step_of_one(tmp_path: Path) -> None:
    for code, output in run_ranks(tmp_path / "two.pt", 2):
        assert code == 0, output[-2000:]
    both = torch.load(tmp_path / "two.pt", weights_only=True)
    for loss_type in LOSSES:
        one, two = steps(loss_type, tmp_path / "trainer"), both[loss_type]
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
