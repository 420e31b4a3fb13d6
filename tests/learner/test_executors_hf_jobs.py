"""Replicas as jobs: the real client of the Hub against a Hub on loopback."""

from __future__ import annotations

import inspect
import runpy
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hintloop.learner.executors import hf_jobs
from hintloop.learner.executors.hf_jobs import LABEL, STATES, HFJobsExecutor
from hintloop.learner.executors.protocol import (
    ExecutorError,
    ReplicaHandle,
    ReplicaResult,
    ReplicaSpec,
    ReplicaState,
    Unreachable,
)
from hintloop.learner.executors.replica_entrypoint import ReplicaJob
from hintloop.learner.executors.run import run_replicas

from .hub import TOKEN, USER, FakeHub, serve

IMAGE = "registry.example/hintloop-app"
WAIT_S = 30.0


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    from huggingface_hub import close_session

    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(HFJobsExecutor, "poll_s", 0.01)
    close_session()
    with serve() as hub:
        yield hub
    close_session()


@pytest.fixture
def executor(hub: FakeHub) -> HFJobsExecutor:
    return HFJobsExecutor(IMAGE, endpoint=hub.url)


def spec(index: int = 0, **more: Any) -> ReplicaSpec:
    return ReplicaSpec(index, ("python", "-m", "module", "job"), **{"timeout_s": 3600.0, **more})


def test_a_job_is_what_its_spec_says(
    hub: FakeHub, executor: HFJobsExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STORE_KEY", "of-nobody's-business")
    hub.plan("SCHEDULING")
    more = {"env": {"A": "b"}, "secrets": ("STORE_KEY",), "volumes": {"/data": f"{USER}/bucket"}}
    (handle,) = executor.launch_replicas([spec(3, hardware="a10g-small", **more)])
    assert handle == ReplicaHandle(next(iter(hub.jobs)), 3)
    sent = hub.jobs[handle.id].spec
    launch = sent["labels"].pop(LABEL)
    assert len(launch) == 32
    assert sent == {
        "command": ["python", "-m", "module", "job"],
        "arguments": [],
        "environment": {"A": "b"},
        "secrets": {"STORE_KEY": "of-nobody's-business"},
        "flavor": "a10g-small",
        "timeoutSeconds": 3600,
        "labels": {"name": "hintloop-replica-3"},
        "volumes": [{"type": "bucket", "source": f"{USER}/bucket", "mountPath": "/data"}],
        "dockerImage": IMAGE,
    }


def test_how_each_ended_is_collected(hub: FakeHub, executor: HFJobsExecutor) -> None:
    hub.plan("SCHEDULING", "SCHEDULING", "RUNNING", "COMPLETED")
    hub.plan(
        "SCHEDULING",
        ("ERROR", "Job failed with exit code: 2. Reason: Error"),
        logs=("step 1", "hintloop: error: no journal", ""),
    )
    hub.plan("RUNNING", ("ERROR", "Job timeout"), logs=("step 1",))
    hub.plan("RUNNING", ("ERROR", "Job failed with exit code: 137"), logs=("step 1",))
    hub.plan("SOMETHING_NEW", "CANCELED")
    handles = executor.launch_replicas([spec(index) for index in range(5)])
    assert executor.poll(handles[0]) is ReplicaState.QUEUED
    assert executor.poll(handles[0]) is ReplicaState.RUNNING
    assert executor.collect(handles, timeout_s=WAIT_S) == (
        ReplicaResult(0, ReplicaState.SUCCEEDED, 0),
        ReplicaResult(1, ReplicaState.FAILED, 2, "hintloop: error: no journal"),
        ReplicaResult(2, ReplicaState.FAILED, None, "Job timeout"),
        ReplicaResult(3, ReplicaState.FAILED, 137, "was killed by SIGKILL"),
        ReplicaResult(4, ReplicaState.CANCELLED),
    )


def test_another_executor_goes_on_with_the_jobs_of_a_dead_one(hub: FakeHub, executor: HFJobsExecutor) -> None:
    hub.plan("RUNNING", "RUNNING", "COMPLETED")
    handles = executor.launch_replicas([spec()])
    (result,) = HFJobsExecutor(IMAGE, endpoint=hub.url).collect(handles, timeout_s=WAIT_S)
    assert result.state is ReplicaState.SUCCEEDED


def test_collecting_bears_a_service_that_fails_for_a_while(hub: FakeHub, executor: HFJobsExecutor) -> None:
    hub.plan("RUNNING", "COMPLETED")
    handles = executor.launch_replicas([spec()])
    hub.failures += [("GET .*", 503), ("GET .*", 429)]
    assert executor.collect(handles, timeout_s=WAIT_S)[0].state is ReplicaState.SUCCEEDED


def test_collecting_says_what_kept_it_from_knowing(hub: FakeHub, executor: HFJobsExecutor) -> None:
    hub.plan("RUNNING")
    (handle,) = executor.launch_replicas([spec()])
    (late,) = executor.collect([handle], timeout_s=0.1)
    assert late == ReplicaResult(0, ReplicaState.RUNNING, None, "has not ended after 0.1 s")
    hub.failures += [("GET .*", 500)] * 1000
    (late,) = executor.collect([handle], timeout_s=0.1)
    assert late.state is ReplicaState.QUEUED
    assert late.error is not None
    assert "500" in late.error
    hub.failures.clear()
    (lost,) = executor.collect([ReplicaHandle("f" * 24, 1)], timeout_s=WAIT_S)
    assert lost.state is ReplicaState.FAILED
    assert lost.error is not None
    assert "404" in lost.error
    assert "\n" not in lost.error


def test_a_service_that_does_not_answer_does_not_hold_anybody(
    hub: FakeHub, executor: HFJobsExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.plan("RUNNING")
    (handle,) = executor.launch_replicas([spec()])
    released = threading.Event()
    monkeypatch.setattr(hf_jobs, "CALL_S", 0.2)
    monkeypatch.setattr(executor._api, "inspect_job", lambda **_: released.wait(WAIT_S))
    started = time.monotonic()
    with pytest.raises(Unreachable, match=r"no answer within 0\.2 s"):
        executor.poll(handle)
    assert time.monotonic() - started < WAIT_S / 2
    released.set()


def test_cancelling_ends_jobs_that_are_not_over(hub: FakeHub, executor: HFJobsExecutor) -> None:
    hub.plan("RUNNING")
    hub.plan("RUNNING", "COMPLETED")
    hub.plan("SCHEDULING")
    handles = executor.launch_replicas([spec(index) for index in range(3)])
    executor.collect(handles[1:2], timeout_s=WAIT_S)
    executor.cancel(handles)
    assert [job.cancelled for job in hub.jobs.values()] == [1, 0, 1]
    states = [result.state for result in executor.collect(handles, timeout_s=WAIT_S)]
    assert states == [ReplicaState.CANCELLED, ReplicaState.SUCCEEDED, ReplicaState.CANCELLED]


def test_one_that_cannot_be_cancelled_does_not_keep_the_others_from_it(
    hub: FakeHub, executor: HFJobsExecutor
) -> None:
    hub.plan("RUNNING")
    hub.plan("RUNNING")
    handles = executor.launch_replicas([spec(0), spec(1)])
    hub.failures.append((f"POST .*/{handles[0].id}/cancel", 403))
    with pytest.raises(ExecutorError, match=rf"not cancelled: replica 0 \({handles[0].id}\): .*403"):
        executor.cancel(handles)
    assert [job.cancelled for job in hub.jobs.values()] == [0, 1]


@pytest.mark.parametrize(("start", "error"), [(402, "402"), (0, "Protocol")])
def test_all_are_started_or_none(hub: FakeHub, executor: HFJobsExecutor, start: int, error: str) -> None:
    """Also when a start was not answered: the job is there all the same."""
    for each in (200, 200, start):
        hub.plan("RUNNING", start=each)
    executor.launch_replicas([spec(7)])
    with pytest.raises(ExecutorError, match=error):
        executor.launch_replicas([spec(0), spec(1)])
    assert [job.cancelled for job in hub.jobs.values()] == ([0, 1] if start else [0, 1, 1])


def test_logs_are_streamed_until_the_job_ends(hub: FakeHub, executor: HFJobsExecutor) -> None:
    job = hub.plan("RUNNING", logs=("first", "x" * 10_000))
    job.hold = threading.Event()
    (handle,) = executor.launch_replicas([spec()])
    lines = iter(executor.stream_logs(handle, timeout_s=WAIT_S))
    assert next(lines) == "first"
    assert next(lines) == "x" * 4096
    job.stages = [("COMPLETED", None)]
    job.hold.set()
    assert list(lines) == []


def test_a_stream_of_logs_has_a_deadline_and_says_what_went_wrong(
    hub: FakeHub, executor: HFJobsExecutor
) -> None:
    job = hub.plan("RUNNING", logs=("only",))
    job.hold = threading.Event()
    (handle,) = executor.launch_replicas([spec()])
    assert list(executor.stream_logs(handle, timeout_s=3.0)) == ["only"]
    job.hold.set()
    with pytest.raises(ExecutorError, match="404"):
        list(executor.stream_logs(ReplicaHandle("f" * 24, 0), timeout_s=WAIT_S))


def test_jobs_run_from_start_to_end(hub: FakeHub, executor: HFJobsExecutor) -> None:
    hub.plan("SCHEDULING", "RUNNING", "RUNNING", ("ERROR", "exit code: 1"), logs=("bad",))
    hub.plan("RUNNING", logs=("good",))
    said: list[str] = []
    results = run_replicas(executor, [spec(0), spec(1)], timeout_s=WAIT_S, together=True, say=said.append)
    assert [result.state for result in results] == [ReplicaState.FAILED, ReplicaState.CANCELLED]
    assert results[0].error == "bad"
    assert {"replica 0 | bad", "replica 1 | good"} <= set(said)


def test_the_example_runs(
    hub: FakeHub,
    repository: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    example = runpy.run_path(str(repository / "examples" / "replicas_elsewhere.py"))
    monkeypatch.setitem(
        example["EXECUTORS"], "hf-jobs", lambda image: HFJobsExecutor(image, endpoint=hub.url)
    )
    monkeypatch.setenv("STORE_KEY", "x")
    (tmp_path / "settings.toml").write_text("[learner]\nsteps = 2\n")
    hub.plan("RUNNING", "COMPLETED")
    hub.plan("RUNNING", ("ERROR", "exit code: 2"), logs=("no journal",))
    words = ["--image", IMAGE, "--config", str(tmp_path / "settings.toml"), "--store", "s3://bucket/run"]
    words += ["--secret", "STORE_KEY", "--volume", f"{USER}/bucket", "--hardware", "a10g-small"]
    assert example["main"](["hf-jobs", *words]) == 1
    said = capsys.readouterr().out.splitlines()
    assert said[-2:] == ["replica 0: succeeded", "replica 1: failed no journal"]
    job = ReplicaJob.model_validate_json(list(hub.jobs.values())[1].spec["command"][-1])
    assert (job.index, job.count, job.rounds) == (1, 2, "s3://bucket/run/rounds")
    assert job.config == "[learner]\nsteps = 2\n"
    assert [job.spec["volumes"][0]["mountPath"] for job in hub.jobs.values()] == ["/data/run"] * 2


def test_what_is_missing_is_said_in_one_line(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, executor: HFJobsExecutor
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_of_another")
    with pytest.raises(ExecutorError, match=r"^HfHubHTTPError: Invalid user token") as refused:
        HFJobsExecutor(IMAGE, endpoint=hub.url).launch_replicas([spec()])
    assert "hf_of_another" not in str(refused.value)
    with pytest.raises(ExecutorError, match="the secret NO_SUCH_KEY is not set"):
        executor.launch_replicas([spec(secrets=("NO_SUCH_KEY",))])
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    with pytest.raises(ExecutorError, match="need a token: `hf auth login`, or the variable HF_TOKEN"):
        HFJobsExecutor(IMAGE)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ExecutorError, match="need the package huggingface_hub: pip install"):
        HFJobsExecutor(IMAGE)


def test_every_stage_that_the_client_knows_has_a_state() -> None:
    from huggingface_hub import JobStage
    from huggingface_hub._jobs_api import TERMINAL_JOB_STAGES

    assert {str(stage.value) for stage in JobStage} == set(STATES)
    assert {stage for stage, state in STATES.items() if state.over} == set(TERMINAL_JOB_STAGES)


def test_calls_fit_the_client_that_is_installed() -> None:
    """What is not reached through the server above, by name: the client's keywords."""
    from huggingface_hub import HfApi

    calls: dict[str, set[str]] = {
        "run_job": {"image", "command", "env", "secrets", "flavor", "timeout", "name", "labels", "volumes"},
        "inspect_job": {"job_id"},
        "fetch_job_logs": {"job_id", "follow", "tail"},
        "cancel_job": {"job_id"},
        "list_jobs": {"labels"},
    }
    for name, keywords in calls.items():
        bound = inspect.signature(getattr(HfApi, name)).bind(None, **dict.fromkeys([*keywords, "namespace"]))
        assert bound.kwargs.keys() == {*keywords, "namespace"}
