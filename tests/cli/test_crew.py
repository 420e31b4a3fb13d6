"""The parts of a run as workers: who is started when, and again. The workers here are puppets of the tests."""

from __future__ import annotations

import asyncio
import json
import os
import time
from typing import Any

import pytest

from hintloop.cli.config import load_config
from hintloop.cli.crew import Crew, Dead, GaveUp, Status, Work
from hintloop.cli.play import arguments_of
from hintloop.cli.runfolder import RunFolder
from hintloop.cli.supervise import ChildSpec


class Puppet:
    """A worker that does what it is told by the test."""

    def __init__(self, spec: ChildSpec) -> None:
        self.spec, self.alive, self.said = spec, True, Status("running", 7)

    async def status(self) -> Status:
        if not self.alive:
            raise Dead("killed by\nSIGKILL")
        return self.said

    async def stop(self) -> None:
        self.alive = False


class Stage:
    """A crew of puppets."""

    def __init__(self, folder: RunFolder, **settings: Any) -> None:
        self.folder = folder
        self.started: list[Puppet] = []
        self.crew = Crew(folder, load_config(preset="smoke", values=settings), self._start, max_restarts=2)

    def _start(self, spec: ChildSpec) -> Puppet:
        self.started.append(Puppet(spec))
        return self.started[-1]

    def look(self, times: int = 1) -> bool:
        return [asyncio.run(self.crew.look()) for _ in range(times)][-1]

    def names(self) -> list[str]:
        return [puppet.spec.name for puppet in self.started]

    def newest(self, name: str) -> Puppet:
        return next(puppet for puppet in reversed(self.started) if puppet.spec.name == name)

    def up(self, name: str, url: str) -> None:
        self.folder.ready(name).write_text(url + "\n")


@pytest.fixture
def stage(empty_run: RunFolder) -> Stage:
    """All that the smoke preset needs is up."""
    stage = Stage(empty_run)
    stage.look()
    stage.up("env", "http://127.0.0.1:1111")
    stage.up("expert", "http://127.0.0.1:2222")
    stage.look(2)
    return stage


def test_the_rollout_side_waits_for_the_servers_and_is_told_where_they_are(empty_run: RunFolder) -> None:
    stage = Stage(empty_run)
    stage.look(3)
    assert stage.names() == ["env", "expert", "learner"]
    stage.up("env", "http://127.0.0.1:1111")
    stage.look(2)
    assert stage.names() == ["env", "expert", "learner"]
    stage.up("expert", "http://127.0.0.1:2222")
    stage.look(2)
    assert stage.names() == ["env", "expert", "learner", "rollout"]
    told = arguments_of(stage.newest("rollout").spec)
    assert told[:3] == ["rollout", "--run", str(empty_run.path)]
    assert told[3:] == ["--env-url", "http://127.0.0.1:1111", "--expert-url", "http://127.0.0.1:2222"]


def test_servers_that_are_there_already_need_no_worker(empty_run: RunFolder) -> None:
    stage = Stage(empty_run, **{"env.servers": ["ws://elsewhere:8000"], "teachers.scripted": False})
    stage.look()
    assert stage.names() == ["learner", "rollout"]


@pytest.mark.parametrize(("name", "port"), [("env", "1111"), ("expert", "2222")])
def test_a_dead_server_comes_back_to_its_address(stage: Stage, name: str, port: str) -> None:
    stage.newest(name).alive = False
    stage.look()
    assert stage.names()[4:] == [name]
    told = arguments_of(stage.newest(name).spec)
    assert told[told.index("--port") + 1] == port
    assert not stage.folder.ready(name).exists()  # it says so anew when it is up


@pytest.mark.parametrize("name", ["learner", "rollout"])
def test_a_dead_worker_is_started_again_as_it_was(stage: Stage, name: str) -> None:
    first = stage.newest(name)
    first.alive = False
    stage.look(3)
    assert stage.names()[4:] == [name]
    assert stage.newest(name).spec == first.spec


def test_a_worker_whose_part_failed_is_ended_and_started_again(stage: Stage) -> None:
    first = stage.newest("learner")
    first.said = Status("failed", 7, "exit status 2")
    stage.look()
    assert not first.alive
    assert stage.newest("learner") is not first


def test_a_server_must_not_end(stage: Stage) -> None:
    stage.newest("env").said = Status("ended", 7)
    stage.look()
    assert stage.names()[4:] == ["env"]


def test_what_dies_too_often_ends_the_run(stage: Stage) -> None:
    for _ in range(2):
        stage.newest("learner").alive = False
        stage.look()
    stage.newest("learner").alive = False
    with pytest.raises(GaveUp, match="learner died 3 times; at last: killed by SIGKILL"):
        stage.look()


def test_the_run_is_over_when_rollout_and_learner_have_ended(stage: Stage) -> None:
    stage.newest("rollout").said = Status("ended", 7)
    assert not stage.look()
    stage.newest("learner").said = Status("ended", 7)
    assert stage.look()
    stage.newest("rollout").alive = stage.newest("learner").alive = False  # nobody asks them any more
    assert stage.look()
    asyncio.run(stage.crew.stop())
    assert len(stage.started) == 4
    assert not any(puppet.alive for puppet in stage.started)


def test_the_run_folder_says_who_works_and_who_was_started_again(stage: Stage) -> None:
    stage.newest("rollout").alive = False
    stage.look(2)
    rows = json.loads((stage.folder.path / "status" / "actors.json").read_text())
    assert [row["part"] for row in rows] == ["env", "expert", "learner", "rollout"]
    assert all(row["state"] == "running" and row["pid"] == 7 for row in rows)
    assert [row["restarts"] for row in rows] == [0, 0, 0, 1]
    assert rows[-1]["restarted"] == "killed by SIGKILL"


@pytest.mark.parametrize(
    ("arguments", "state", "said"),
    [(["config"], "ended", ""), (["report", "/nowhere"], "failed", "exit status 2")],
)
def test_work_ends_as_its_command_does(arguments: list[str], state: str, said: str) -> None:
    work = Work(arguments)
    deadline = time.monotonic() + 60
    while work.status.state == "running":
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert work.status == Status(state, os.getpid(), said)  # type: ignore[arg-type]
