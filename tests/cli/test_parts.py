"""The commands that run one part of the loop, with the other parts beside them."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hintloop.agent import student
from hintloop.cli.main import run_command
from hintloop.replay.journal import Journal
from hintloop.replay.weights import WeightStore

STUDENT = Path(student.__file__).parent / "student-tiny"
LIMIT_S = 300.0


@pytest.fixture
def env_url(tmp_path: Path) -> Iterator[str]:
    ready = tmp_path / "url"
    words = ["serve", "env", "--port", "0", "--ready-file", str(ready)]
    server = subprocess.Popen([sys.executable, "-m", "hintloop.cli.main", *words])
    try:
        deadline = time.monotonic() + LIMIT_S
        while not ready.exists():
            assert server.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield ready.read_text().strip()
    finally:
        server.terminate()
        server.wait(30)


def publish_the_last_version(run: Path) -> None:
    """What a learner does that is content with one group."""
    deadline = time.monotonic() + LIMIT_S
    while not Journal(run / "journal").segments() and time.monotonic() < deadline:
        time.sleep(0.05)
    WeightStore(run / "weights").publish(1, STUDENT, metadata={"final": True})


def test_rollout_plays_with_the_program_that_the_option_names(
    tmp_path: Path, repository: Path, env_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run, played = tmp_path / "run", tmp_path / "played"
    WeightStore(run / "weights").publish(0, STUDENT, metadata={})
    program = f'"{sys.executable}" -I "{repository}/examples/simple_agent.py"'
    agent = f'{program} && echo "$HINTLOOP_TASK_ID" >> "{played}"'
    settings = [
        *("rollout.groups_per_step=1", "learner.groups_per_step=1", "rollout.group_size=2"),
        *("rollout.episodes_in_flight=2", "evaluation.num_tasks=1", "evaluation.during=[]"),
        *('evaluation.splits=["heldfn"]', "evaluation.temperatures=[0.0]", "teachers.scripted=false"),
    ]
    learner = threading.Thread(target=publish_the_last_version, args=(run,), daemon=True)
    learner.start()
    code = run_command(
        ["rollout", "--run", str(run), "--env-url", env_url, "--agent", agent, "--preset", "smoke"]
        + [word for setting in settings for word in ("--set", setting)]
    )
    learner.join(LIMIT_S)
    printed = capsys.readouterr()
    assert code == 0, printed.err
    assert "rollout ended (final)" in printed.out
    episodes = Journal(run / "journal").reader().poll()
    assert len(episodes) >= 2
    assert {episode.task_id for episode in episodes} <= set(played.read_text().split())
    assert all(sum(episode.loss_mask) and episode.reward is not None for episode in episodes)


def test_a_log_for_which_there_is_no_room_costs_nobody_anything() -> None:
    code = """
import structlog
from hintloop.cli.parts import _log_to_stderr
_log_to_stderr()
structlog.get_logger().warning("a_disk_is_full")
print("goes on")
"""
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-c", code]
        done = subprocess.run(
            command, stderr=full, stdout=subprocess.PIPE, text=True, timeout=LIMIT_S, check=False
        )
    assert (done.returncode, done.stdout) == (0, "goes on\n")
