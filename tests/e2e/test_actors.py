"""The loop as Monarch actors, on a Python that has torchmonarch: actors are killed, come back, and the run ends."""

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hintloop.replay.journal import Journal

PYTHON = "HINTLOOP_MONARCH_PYTHON"
STEPS = 4
SMALL = (
    "rollout.group_size=4",
    "rollout.groups_per_step=2",
    "rollout.episodes_in_flight=8",
    "rollout.engine_slots=8",
    "evaluation.num_tasks=2",
    "evaluation.in_flight=4",
    "evaluation.during=[]",
    "evaluation.temperatures=[1.0]",
    "teachers.ask_probability=0.5",
    f"learner.steps={STEPS}",
)
DEADLINE_S = 900  # two minutes on two idle cores


@pytest.fixture
def python() -> str:
    """A Python that has both torchmonarch and hintloop."""
    if importlib.util.find_spec("monarch"):
        return sys.executable
    named = os.environ.get(PYTHON)
    if named is None:
        pytest.skip(f"needs torchmonarch, of the extra monarch; {PYTHON} may name a Python that has it")
    assert shutil.which(named), f"{PYTHON}: {named} is no program"
    return named


class Run:
    """A run that was started, in the eyes of somebody who kills."""

    def __init__(self, python: str, folder: Path) -> None:
        self.folder, self.log = folder, folder.with_suffix(".log")
        example = Path(__file__).parent.parent.parent / "examples" / "monarch" / "play.py"
        command = [python, str(example), "--preset", "smoke", "--name", folder.name]
        for setting in (*SMALL, f"run.output={folder.parent}"):
            command += ["--set", setting]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        self.deadline = time.monotonic() + DEADLINE_S

    def wait(self, true: Callable[[], bool], what: str) -> None:
        while not true():
            if time.monotonic() > self.deadline or self.process.poll() is not None:
                pytest.fail(f"not seen: {what}\n{self.log.read_text()[-3000:]}")
            time.sleep(0.05)

    def actor(self, part: str) -> dict[str, object]:
        path = self.folder / "status" / "actors.json"
        rows = json.loads(path.read_text()) if path.exists() else []
        return next((row for row in rows if row["part"] == part), {"state": "missing"})

    def works(self, part: str) -> bool:
        return self.actor(part)["state"] == "running"

    def trained(self) -> list[dict[str, list[str]]]:
        path = self.folder / "trained.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def kill(self, *parts: str) -> None:
        """Kill actors at the same time, and see them come back in other processes."""
        self.wait(lambda: all(map(self.works, parts)), f"{parts} at work")
        before = {part: self.actor(part)["pid"] for part in parts}
        for pid in before.values():
            os.kill(int(str(pid)), signal.SIGKILL)
        for part in parts:
            self.wait(
                lambda part=part: self.actor(part).get("restarts") == 1 and self.works(part),
                f"{part} is back",
            )
            assert self.actor(part)["pid"] != before[part]

    def end(self) -> int:
        try:
            return self.process.wait(max(self.deadline - time.monotonic(), 0))
        except subprocess.TimeoutExpired:
            pytest.fail(f"did not end\n{self.log.read_text()[-3000:]}")


@pytest.mark.slow
def test_killed_actors_come_back_and_nothing_is_lost_or_repeated(python: str, tmp_path: Path) -> None:
    run = Run(python, tmp_path / "killed")
    try:
        run.wait(lambda: len(run.trained()) >= 1, "first step")
        run.kill("learner", "expert")
        run.wait(lambda: len(run.trained()) >= 2, "second step")
        run.kill("rollout", "env")
        assert run.end() == 0, run.log.read_text()[-3000:]
    finally:
        run.process.kill()  # and with it its actors
        run.process.wait()
    journal = Journal(str(run.folder / "journal"))
    played = [episode.episode_id for name in journal.segments() for episode in journal.read(name)]
    learned = [episode for record in run.trained() for episode in record["episodes"]]
    assert len(played) == len(set(played))
    assert len(learned) == len(set(learned)) == STEPS * 2 * 4
    assert set(learned) <= set(played)
    summary = json.loads((run.folder / "summary.json").read_text())
    assert summary["weights"]["steps"] == STEPS
    assert all(split["before"] and split["after"] for split in summary["held_out"])
    assert [run.actor(part)["state"] for part in ("learner", "rollout")] == ["ended", "ended"]
