"""Two processes of one learner."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
DEADLINE_S = 900


def launch(module: str, *words: str, folder: Path) -> str:
    """Two processes of a module by ``torchrun``, with one thread each; what they print."""
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "--"]
    done = subprocess.run(
        [sys.executable, "-m", *launcher, module, *words],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "1"},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
