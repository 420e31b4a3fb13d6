"""The whole loop as its users run it: real servers, sandbox, engine and learner, on the bundled student."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hintloop.replay.journal import Journal

STEPS = 4
SMALL = (
    "rollout.group_size=4",
    "rollout.groups_per_step=2",
    "rollout.episodes_in_flight=8",
    "rollout.engine_slots=8",
    "evaluation.num_tasks=4",
    "evaluation.in_flight=4",
    "evaluation.during=[]",
    "teachers.ask_probability=0.5",
    f"learner.steps={STEPS}",
    "learner.grad_norm_every=2",
)
DEADLINE_S = 900


@contextmanager
def play(run: Path, *, resume: bool = False) -> Iterator[subprocess.Popen[bytes]]:
    """``hintloop play`` on a small run, or on one that it resumes; what does not end by itself is ended."""
    arguments = ["--resume", str(run)] if resume else ["--preset", "smoke", "--name", run.name]
    if not resume:
        for setting in (*SMALL, f"run.output={run.parent}"):
            arguments += ["--set", setting]
    command = [sys.executable, "-m", "hintloop.cli.main", "play", *arguments]
    with (run.parent / "play.log").open("ab") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def finish(process: subprocess.Popen[bytes], run: Path) -> int:
    """The exit code; what was printed shows when the deadline passes."""
    try:
        return process.wait(DEADLINE_S)
    except subprocess.TimeoutExpired:
        pytest.fail((run.parent / "play.log").read_text()[-3000:])


def children(parent: int) -> dict[str, int]:
    """Command word -> pid of the processes that ``play`` started."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            stat, words = folder.joinpath("stat").read_text(), folder.joinpath("cmdline").read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(stat.rpartition(")")[2].split()[1]) == parent:
            found.update({word.decode(): int(folder.name) for word in words.split(b"\0")})
    return found


def wait_until(true, run: Path, what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not true():
        if time.monotonic() > deadline:
            pytest.fail(
                f"{what}: not within {DEADLINE_S} s\n" + (run.parent / "play.log").read_text()[-3000:]
            )
        time.sleep(0.05)


def trained(run: Path) -> list[dict]:
    path = run / "trained.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def check_nothing_lost_or_repeated(run: Path) -> None:
    """Every trained episode is in the journal, once in each; groups are whole."""
    journal = Journal(str(run / "journal"))
    episodes = [episode for name in journal.segments() for episode in journal.read(name)]
    ids = [episode.episode_id for episode in episodes]
    assert len(ids) == len(set(ids))
    records = trained(run)
    learned = [episode_id for record in records for episode_id in record["episodes"]]
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    assert len(learned) == len(set(learned)) == STEPS * 2 * 4
    assert set(learned) <= set(ids)
    groups = [episode.group_id for episode in episodes]
    assert all(groups.count(group) == 4 for group in groups)


@pytest.mark.slow
def test_play_runs_all_three_channels_and_reports(tmp_path):
    run = tmp_path / "whole"
    with play(run) as process:
        assert finish(process, run) == 0, (tmp_path / "play.log").read_text()[-3000:]
    check_nothing_lost_or_repeated(run)
    rows = [json.loads(line) for line in (run / "metrics" / "learner.jsonl").read_text().splitlines()]
    assert sum(row["sites"] for row in rows) > 0
    assert sum(row["pairs"] for row in rows) > 0
    assert all(any(f"grad_norm_{channel}" in row for row in rows) for channel in ("grpo", "sdpo", "dpo"))
    labels = {json.loads(line)["label"] for line in (run / "evaluation.jsonl").read_text().splitlines()}
    assert {"before", "after"} <= labels
    for name in ("summary.json", "report.md"):
        assert (run / name).stat().st_size > 0
    assert list(run.glob("*.png"))


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["rollout", "learn"])
def test_killed_part_resumes_without_loss_or_repetition(tmp_path, victim):
    run = tmp_path / "killed"
    with play(run) as process:
        wait_until(lambda: len(trained(run)) >= 1, run, "first training step")
        os.kill(children(process.pid)[victim], signal.SIGKILL)
        assert finish(process, run) != 0
    assert "--resume" in (tmp_path / "play.log").read_text()
    assert len(trained(run)) < STEPS
    with play(run, resume=True) as process:
        assert finish(process, run) == 0, (tmp_path / "play.log").read_text()[-3000:]
    check_nothing_lost_or_repeated(run)
