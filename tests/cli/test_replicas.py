"""All replicas by one command. The replicas are tiny scripts."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from hintloop.cli import replicas
from hintloop.cli.main import run_command
from hintloop.learner.executors.replica_entrypoint import ReplicaJob

FAILS = "import sys; print('last words'); sys.exit(3 if sys.argv[1] == '1' else 0)"
ASKED = "import sys; print(sys.argv[2])"
SAVES = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit("saved"))
if sys.argv[1] == "0":
    open({ready!r}, "w").close()
else:
    while not os.path.exists({ready!r}):
        time.sleep(0.02)
    os.kill({command}, {number})
time.sleep(60)
"""


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What replicas run; it gets its number and its job."""
    holder = [ASKED]

    def command(job: ReplicaJob, *, python: str) -> tuple[str, ...]:
        return (python, "-S", "-c", holder[0], str(job.index), job.model_dump_json())

    monkeypatch.setattr(replicas, "command", command)
    return holder


def learn(run: Path, *words: str) -> int:
    return run_command(["learn", "--run", str(run), "--executor", "local", *words])


@pytest.mark.usefixtures("script")
def test_each_replica_gets_its_job_and_the_same_settings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert learn(tmp_path, "--replicas", "2", "--set", "learner.steps=7", "--follow", "--json") == 0
    said = capsys.readouterr()
    assert json.loads(said.out) == [
        {"index": index, "state": "succeeded", "exit_code": 0, "error": None} for index in (0, 1)
    ]
    logs = [(tmp_path / "logs" / f"replica-{index}.log").read_text() for index in (0, 1)]
    first, second = (ReplicaJob.model_validate_json(log) for log in logs)
    assert first.model_copy(update={"index": 1}) == second
    assert (second.count, second.follow, second.rounds) == (2, True, str(tmp_path / "rounds"))
    assert "steps = 7" in second.config
    assert f"replica 1 | {logs[1]}" in said.err


@pytest.mark.usefixtures("script")
def test_the_place_to_meet_is_the_one_that_was_set(tmp_path: Path) -> None:
    for option, place in (("lighthouse", "http://127.0.0.1:1"), ("rounds", "memory://rounds")):
        assert learn(tmp_path / option, "--replicas", "1", f"--{option}", place) == 0
        job = ReplicaJob.model_validate_json((tmp_path / option / "logs" / "replica-0.log").read_text())
        assert (job.lighthouse, job.rounds) == ((place, None) if option == "lighthouse" else (None, place))


def test_one_that_fails_makes_the_command_fail(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], script: list[str]
) -> None:
    script[0] = FAILS
    assert learn(tmp_path, "--replicas", "2", "--lighthouse", "http://127.0.0.1:1", "--json") == 1
    results = json.loads(capsys.readouterr().out)
    assert [result["state"] for result in results] == ["succeeded", "failed"]
    assert results[1]["error"] == "last words"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_lets_each_replica_save_what_it_has(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], script: list[str], number: int
) -> None:
    script[0] = SAVES.format(ready=str(tmp_path / "ready"), command=os.getpid(), number=int(number))
    assert learn(tmp_path, "--replicas", "2") == 130
    said = capsys.readouterr()
    assert "replica 1 | saved" in said.err
    assert "replica 0 | saved" in said.err


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--replicas", "2", "--replica", "1"], "--executor starts all replicas, --replica is one of them"),
        ([], "--executor starts all learners of --replicas N: give their number"),
        (["--replicas", "2", "--executor", "slurm"], "no executor 'slurm'; there is local"),
    ],
)
def test_what_does_not_fit_together_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], why: str
) -> None:
    assert learn(tmp_path, *words) == 2
    assert why in capsys.readouterr().err
