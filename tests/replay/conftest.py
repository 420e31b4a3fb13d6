"""Fixtures for the journal and the weight store."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from hintloop.replay.episode import NOT_SAMPLED, Episode, HintSite, Outcome, PreferencePair, Turn

DEADLINE_SECONDS = 60


@pytest.fixture
def make_episode() -> Callable[..., Episode]:
    """``make_episode(3)`` is always the same small episode ``e3`` of group ``g1``."""

    def make(number: int) -> Episode:
        return Episode(
            episode_id=f"e{number}",
            group_id=f"g{number // 2}",
            task_id="bugfix/1",
            env="coding",
            source="rollout",
            created_at=1000.0 + number,
            model="student",
            tokenizer_fingerprint="abc",
            token_ids=(number, 7, 8, 9),
            loss_mask=(0, 0, 1, 1),
            logprobs=(0.0, 0.0, -0.5, -1.25),
            policy_versions=(NOT_SAMPLED, NOT_SAMPLED, 3, 4),
            turns=(
                Turn("user", 0, 2, "fix it"),
                Turn("assistant", 2, 4, "run", tool_name="run", exit_code=1),
            ),
            outcome=Outcome.SOLVED,
            reward=1.0,
            reward_parts={"tests": 1.0},
            hint_sites=(HintSite(1, "timeout", "be quick", 1, 2, 4, (5, 6)),),
            pairs=(PreferencePair(1, 2, (1, 2), (3, 4), "a", "b", 2, 1, True, ("teacher",), 0.01),),
        )

    return make


@pytest.fixture(params=["file", "path", "memory"])
def uri(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A fresh place on each kind of storage that needs no network."""
    return {
        "file": f"file://{tmp_path}/store",
        "path": f"{tmp_path}/store",
        "memory": f"memory://{uuid4().hex}/store",
    }[request.param]


@pytest.fixture
def run_and_kill() -> Iterator[Callable[..., list[str]]]:
    """``run_and_kill(code, *arguments, lines=2, after=0.1)`` gives what a process printed until SIGKILL.

    The clock starts when it has printed ``lines`` lines. Every process is gone when the test ends.
    """
    children: list[subprocess.Popen[str]] = []

    def run(code: str, *arguments: str, lines: int, after: float) -> list[str]:
        limited = f"import signal; signal.alarm({DEADLINE_SECONDS})\n{code}"
        child = subprocess.Popen(
            [sys.executable, "-c", limited, *arguments], stdout=subprocess.PIPE, text=True
        )
        children.append(child)
        assert child.stdout is not None
        seen = "".join(child.stdout.readline() for _ in range(lines))
        time.sleep(after)
        assert child.poll() is None, "the process ended by itself"
        os.kill(child.pid, signal.SIGKILL)
        rest, _ = child.communicate(timeout=DEADLINE_SECONDS)
        return (seen + rest).split("\n")[:-1]  # what follows the last line break was cut off by the kill

    yield run
    for child in children:
        if child.poll() is None:
            child.kill()
            child.wait(timeout=DEADLINE_SECONDS)
