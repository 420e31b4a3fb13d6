"""Several processes make the very step that one makes."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

TESTS = Path(__file__).parents[1]
DEADLINE_S = 240


def run_ranks(folder: Path, count: int, settings: dict[str, Any]) -> list[subprocess.CompletedProcess[str]]:
    """Start ``count`` processes that find each other over loopback, and wait for them."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "ACCELERATE_USE_CPU": "1"}
    command = [sys.executable, "-m", "learner.ranks", str(folder / f"{count}.pt"), json.dumps(settings)]
    started = []
    for rank in range(count):
        ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count)} if count > 1 else {}
        started.append(
            subprocess.Popen(
                command,
                cwd=TESTS,
                env={**common, **ranks},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    try:
        outputs = [process.communicate(timeout=DEADLINE_S)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    return [
        subprocess.CompletedProcess(command, process.returncode, output)
        for process, output in zip(started, outputs, strict=True)
    ]


@pytest.mark.parametrize("loss_type", ["dapo", "grpo"])
def test_two_processes_make_the_gradient_of_one(loss_type: str, tmp_path: Path) -> None:
    settings = {"loss_type": loss_type, "micro_batches": 4}
    for count in (1, 2):
        for done in run_ranks(tmp_path, count, settings):
            assert done.returncode == 0, done.stdout[-2000:]
    one, two = (torch.load(tmp_path / f"{count}.pt", weights_only=True) for count in (1, 2))
    for before, after in zip(one["gradients"], two["gradients"], strict=True):
        assert before.norm() > 1e-3
        assert (before - after).norm() < 1e-5 * max(1.0, float(before.norm()))
    for name, weight in one["weights"].items():
        torch.testing.assert_close(two["weights"][name], weight, atol=1e-5, rtol=0)
    for before, after in zip(one["metrics"], two["metrics"], strict=True):
        assert after == pytest.approx(before, rel=1e-4, abs=1e-6)


def test_processes_that_cannot_share_the_micro_batches_are_refused(tmp_path: Path) -> None:
    for done in run_ranks(tmp_path, 2, {"micro_batches": 3}):
        assert done.returncode != 0
        assert "2 processes cannot share 3 micro-batches evenly" in done.stdout
