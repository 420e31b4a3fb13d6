"""What a job runs: it becomes ``hintloop learn``, or says in one line why not."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hintloop.learner.executors.replica_entrypoint import VARIABLE, ReplicaJob, command

TEXT = st.none() | st.text()
JOBS = st.builds(
    ReplicaJob,
    index=st.integers(0, 9),
    count=st.integers(1, 9),
    run=st.text(),
    config=st.text(),
    rounds=TEXT,
    lighthouse=TEXT,
    journal=TEXT,
    weights=TEXT,
    follow=st.booleans(),
)


def run(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run the module as a job does."""
    return subprocess.run(
        [*command(ReplicaJob(index=0, count=1, run=""), python=sys.executable)[:3], *arguments],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@given(JOBS)
def test_a_job_survives_its_command(job: ReplicaJob) -> None:
    *_, text = command(job)
    assert ReplicaJob.model_validate_json(text) == job


@given(JOBS)
def test_hintloop_learn_is_told_what_the_job_says(job: ReplicaJob) -> None:
    words = job.learn(Path("settings"))
    assert words[:5] == ["learn", "--run", job.run, "--config", "settings"]
    assert words[words.index("--replica") + 1] == str(job.index)
    assert (words[-1] == "--follow") == job.follow or "--follow" in (job.weights, job.journal)
    if job.rounds is not None:
        assert ("--rounds", job.rounds) in itertools.pairwise(words)
    assert "--config" not in job.model_copy(update={"run": "r"}).learn(None)[:4]


@pytest.mark.parametrize(
    ("job", "why"),
    [
        ("", "Invalid JSON"),
        ("[1]", "Input should be an object"),
        ('{"index": 0, "count": 1}', "run: Field required"),
        ('{"index": 0, "count": 0, "run": "r"}', "count: Input should be greater than or equal to 1"),
        ('{"index": 0, "count": 1, "run": "r", "round": "s3://b"}', "round: Extra inputs are not permitted"),
    ],
)
def test_what_is_no_job_is_said_in_one_line(job: str, why: str) -> None:
    ended = run(job)
    assert ended.returncode == 2
    assert ended.stdout.startswith(f"hintloop: error: the replica's job is not one: {why}")
    assert ended.stdout.count("\n") == 1
    assert ended.stderr == ""


def test_what_hintloop_learn_complains_of_is_the_last_line_of_the_log(tmp_path: Path) -> None:
    job = ReplicaJob(index=1, count=2, run=str(tmp_path / "run"), config="[learner]\nstepz = 1\n")
    ended = run(**{VARIABLE: job.model_dump_json()})
    assert ended.returncode == 2
    assert ended.stdout.splitlines()[-1].startswith("hintloop: error: unknown key 'learner.stepz'")
    assert (tmp_path / "run" / "replica-1" / "settings.toml").read_text() == job.config


def test_a_run_folder_that_cannot_be_written_is_said_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    job = ReplicaJob(index=0, count=1, run=str(tmp_path / "file"), config="[learner]\n")
    ended = run(job.model_dump_json())
    assert ended.returncode == 2
    assert ended.stdout.startswith("hintloop: error: [Errno 20] Not a directory")
