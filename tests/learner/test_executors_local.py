"""Replicas as processes: how they end reaches who started them, and nothing of them is left. They are tiny scripts."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hintloop.learner.executors import local as local_module
from hintloop.learner.executors.local import LocalProcessExecutor
from hintloop.learner.executors.protocol import (
    ExecutorError,
    ReplicaHandle,
    ReplicaResult,
    ReplicaSpec,
    ReplicaState,
    ServerlessExecutor,
    explain,
)
from hintloop.learner.executors.run import run_replicas
from hintloop.learner.executors.waiting import LINE_CHARS

WAIT_S = 30.0
PATIENT = "import time\ntime.sleep(60)"
SAVES = """
import pathlib, signal, sys, time
def end(*_):
    print("saved", flush=True)
    sys.exit(130)
signal.signal(signal.SIGTERM, end)
print("up", flush=True)
time.sleep(60)
"""
STUBBORN_TREE = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"])
print(child.pid, flush=True)
time.sleep(60)
"""


def spec(code: str, *arguments: object, index: int = 0, **settings: Any) -> ReplicaSpec:
    command = (sys.executable, "-S", "-c", code, *map(str, arguments))
    return ReplicaSpec(index, command, **{"timeout_s": 60.0, **settings})


@pytest.fixture
def executor(tmp_path: Path) -> Iterator[LocalProcessExecutor]:
    with LocalProcessExecutor(tmp_path / "logs", stop_s=10) as made:
        yield made


def run(executor: ServerlessExecutor, *specs: ReplicaSpec) -> tuple[ReplicaResult, ...]:
    return executor.collect(executor.launch_replicas(specs), timeout_s=WAIT_S)


def first_line(executor: ServerlessExecutor, handle: ReplicaHandle) -> str:
    return next(iter(executor.stream_logs(handle, timeout_s=WAIT_S)))


def alive(pid: int) -> bool:
    """Whether the process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def test_how_each_ended_is_collected_in_the_order_asked_for(executor: LocalProcessExecutor) -> None:
    failing = (
        "import sys\nprint('step 1')\nprint('  hintloop: error: no such  journal\\n', file=sys.stderr)\n"
    )
    failing += "sys.exit(2)"
    codes = ["print('done')", failing, "import os; os.kill(os.getpid(), 9)", "import sys; sys.exit(3)"]
    handles = executor.launch_replicas([spec(code, index=i) for i, code in enumerate(codes)])
    assert [handle.index for handle in handles] == [0, 1, 2, 3]
    assert executor.collect(handles[::-1], timeout_s=WAIT_S) == (
        ReplicaResult(3, ReplicaState.FAILED, 3, "ended with exit code 3"),
        ReplicaResult(2, ReplicaState.FAILED, 137, "was killed by SIGKILL"),
        ReplicaResult(1, ReplicaState.FAILED, 2, "hintloop: error: no such journal"),
        ReplicaResult(0, ReplicaState.SUCCEEDED, 0),
    )
    executor.cancel(handles)
    assert executor.poll(handles[0]) is ReplicaState.SUCCEEDED, "what is over stays as it is"


def test_one_that_takes_too_long_is_ended(executor: LocalProcessExecutor) -> None:
    (result,) = run(executor, spec(STUBBORN_TREE, timeout_s=0.5))
    assert result == ReplicaResult(0, ReplicaState.FAILED, 124, "took longer than 0.5 s")


def test_a_command_that_is_not_there_is_a_failed_replica(executor: LocalProcessExecutor) -> None:
    (result,) = run(executor, ReplicaSpec(0, ("/no/such/python",), timeout_s=5.0))
    assert result.exit_code == 127
    assert result.error == "cannot start /no/such/python: No such file or directory"


def test_one_whose_guard_is_killed_is_a_failed_replica(executor: LocalProcessExecutor) -> None:
    (handle,) = executor.launch_replicas([spec(STUBBORN_TREE)])
    grandchild = int(first_line(executor, handle))
    os.kill(int(handle.id), signal.SIGKILL)
    (result,) = executor.collect([handle], timeout_s=WAIT_S)
    assert (result.state, result.exit_code) == (ReplicaState.FAILED, 137)
    assert wait_until(lambda: not alive(grandchild))


def test_collecting_has_a_deadline(executor: LocalProcessExecutor) -> None:
    handles = executor.launch_replicas([spec(PATIENT), spec("print()", index=1)])
    executor.collect(handles[1:], timeout_s=WAIT_S)
    waiting, ended = executor.collect(handles, timeout_s=0.3)
    assert waiting == ReplicaResult(0, ReplicaState.RUNNING, None, "has not ended after 0.3 s")
    assert ended.state is ReplicaState.SUCCEEDED


def test_a_replica_that_is_cancelled_may_save_what_it_has(executor: LocalProcessExecutor) -> None:
    (handle,) = executor.launch_replicas([spec(SAVES)])
    assert first_line(executor, handle) == "up"
    executor.cancel([handle])
    assert list(executor.stream_logs(handle, timeout_s=WAIT_S)) == ["up", "saved"]
    (result,) = executor.collect([handle], timeout_s=WAIT_S)
    assert result == ReplicaResult(0, ReplicaState.CANCELLED, 130)


def test_cancelling_ends_the_whole_tree_of_one_that_will_not_go(tmp_path: Path) -> None:
    executor = LocalProcessExecutor(tmp_path, stop_s=0.3)
    (handle,) = executor.launch_replicas([spec(STUBBORN_TREE)])
    grandchild = int(first_line(executor, handle))
    assert alive(grandchild)
    executor.cancel([handle])
    assert executor.poll(handle) is ReplicaState.CANCELLED
    assert wait_until(lambda: not alive(grandchild))
    assert not alive(int(handle.id))


def test_what_a_replica_leaves_behind_ends_with_it(executor: LocalProcessExecutor) -> None:
    code = STUBBORN_TREE.replace("time.sleep(60)\n", "sys.exit(0)\n")
    assert code != STUBBORN_TREE
    (handle,) = executor.launch_replicas([spec(code)])
    assert executor.collect([handle], timeout_s=WAIT_S)[0].state is ReplicaState.SUCCEEDED
    grandchild = int(first_line(executor, handle))
    assert wait_until(lambda: not alive(grandchild))


KEEPER = """
import sys, time
from pathlib import Path
from hintloop.learner.executors.local import LocalProcessExecutor
from hintloop.learner.executors.protocol import ReplicaSpec
executor = LocalProcessExecutor(Path(sys.argv[1]))
(handle,) = executor.launch_replicas([ReplicaSpec(0, (sys.executable, "-S", "-c", sys.argv[2]), timeout_s=60.0)])
print(next(iter(executor.stream_logs(handle, timeout_s=30))), handle.id, flush=True)
time.sleep(60)
"""


def test_sigkill_of_the_executor_leaves_nothing(tmp_path: Path) -> None:
    keeper = subprocess.Popen(
        [sys.executable, "-c", KEEPER, str(tmp_path), STUBBORN_TREE], stdout=subprocess.PIPE, text=True
    )
    with keeper:
        assert keeper.stdout is not None
        pids = [int(word) for word in keeper.stdout.readline().split()]
        assert len(pids) == 2
        assert all(alive(pid) for pid in pids)
        keeper.kill()
    assert wait_until(lambda: not any(alive(pid) for pid in pids))


def test_logs_are_streamed_while_the_replica_runs(executor: LocalProcessExecutor, tmp_path: Path) -> None:
    code = "import pathlib, sys, time\nprint('first', flush=True)\n"
    code += "while not pathlib.Path(sys.argv[1]).exists(): time.sleep(0.02)\n"
    code += "print('second\\n\\nlast', end='', flush=True)"
    (executor._logs / "replica-0.log").parent.mkdir(parents=True)
    (executor._logs / "replica-0.log").write_text("of an earlier launch\n")
    (handle,) = executor.launch_replicas([spec(code, tmp_path / "go")])
    lines = iter(executor.stream_logs(handle, timeout_s=WAIT_S))
    assert next(lines) == "first"
    assert executor.poll(handle) is ReplicaState.RUNNING
    (tmp_path / "go").touch()
    assert list(lines) == ["second", "", "last"]


def test_a_stream_of_logs_has_a_deadline(executor: LocalProcessExecutor) -> None:
    silent, busy = executor.launch_replicas(
        [spec(PATIENT), spec("import os\nwhile True: os.write(1, b'x\\n' * 1000)", index=1)]
    )
    assert first_line(executor, busy) == "x"
    assert list(executor.stream_logs(silent, timeout_s=0.3)) == []
    assert set(executor.stream_logs(busy, timeout_s=0.3)) == {"x"}
    executor.cancel([silent, busy])


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(pieces=st.lists(st.binary(max_size=20) | st.integers(0, 3 * LINE_CHARS).map(lambda n: b"z" * n)))
def test_lines_are_what_was_written_and_none_is_too_long(tmp_path: Path, pieces: list[bytes]) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"")
    found, rest = [], b""
    with path.open("rb") as reading, path.open("ab", buffering=0) as writing:
        for piece in pieces:
            writing.write(piece)
            for line in local_module._read_lines(reading, rest):
                rest = b"" if line.endswith(b"\n") else line
                found += [line] if line.endswith(b"\n") else []
    found += [rest]
    assert b"".join(found).replace(b"\n", b"") == b"".join(pieces).replace(b"\n", b"")
    assert all(len(line) <= LINE_CHARS + 1 for line in found)


def test_secrets_go_by_name(executor: LocalProcessExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STORE_KEY", "of-nobody's-business")
    asks = spec("import os; print(len(os.environ['STORE_KEY']), os.environ['PLAIN'])", secrets=("STORE_KEY",))
    asks = dataclasses.replace(asks, env={"PLAIN": "seen"})
    assert "nobody" not in repr(asks)
    (handle,) = executor.launch_replicas([asks])
    assert list(executor.stream_logs(handle, timeout_s=WAIT_S)) == ["20 seen"]
    with pytest.raises(ExecutorError, match="the secret NO_SUCH_KEY is not set in the environment"):
        executor.launch_replicas([spec(PATIENT, secrets=("STORE_KEY", "NO_SUCH_KEY"))])


@pytest.mark.parametrize("more", [{"hardware": "a100"}, {"volumes": {"/data": "me/bucket"}}])
def test_what_this_machine_cannot_give_is_refused(
    executor: LocalProcessExecutor, more: dict[str, Any]
) -> None:
    with pytest.raises(ExecutorError, match="replica 0 has this machine's hardware and folders"):
        executor.launch_replicas([spec(PATIENT, **more)])


def test_all_are_started_or_none(executor: LocalProcessExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []
    popen = subprocess.Popen

    def note(*arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
        process = popen(*arguments, **options)
        started.append(process.pid)
        return process

    monkeypatch.setattr(subprocess, "Popen", note)
    (executor._logs / "replica-1.log").mkdir(parents=True)
    with pytest.raises(ExecutorError, match=r"cannot start replicas: .*replica-1"):
        executor.launch_replicas([spec(PATIENT), spec(PATIENT, index=1)])
    assert len(started) == 1
    assert not alive(started[0])


def test_a_process_of_another_executor_is_not_known(executor: LocalProcessExecutor) -> None:
    with pytest.raises(ExecutorError, match="process 1 was not started by this executor"):
        executor.poll(ReplicaHandle("1", 0))
    (result,) = executor.collect([ReplicaHandle("1", 7)], timeout_s=1)
    assert (result.index, result.state) == (7, ReplicaState.FAILED)


@pytest.mark.parametrize(("together", "state"), [(True, "cancelled"), (False, "succeeded")])
def test_replicas_that_need_each_other_do_not_wait_for_a_failed_one(
    executor: LocalProcessExecutor, tmp_path: Path, together: bool, state: str
) -> None:
    patient = "import pathlib, sys, time\nprint('up', flush=True)\n"
    patient += "while not pathlib.Path(sys.argv[1]).exists(): time.sleep(0.02)"
    said: list[str] = []

    def say(line: str) -> None:
        said.append(line)
        if not together and line == "replica 1 | bad":
            (tmp_path / "go").touch()

    specs = [spec(patient, tmp_path / "go"), spec("import sys; print('bad'); sys.exit(1)", index=1)]
    first, second = run_replicas(executor, specs, timeout_s=WAIT_S, together=together, say=say)
    assert (second.state, second.error) == (ReplicaState.FAILED, "bad")
    assert first.state == state
    assert "replica 1 | bad" in said


def test_replicas_are_cancelled_when_somebody_asks_or_the_time_is_up(executor: LocalProcessExecutor) -> None:
    said: list[str] = []
    results = run_replicas(
        executor,
        [spec(SAVES), spec(SAVES, index=1)],
        timeout_s=WAIT_S,
        together=False,
        say=said.append,
        stopped=lambda: said.count("replica 0 | up") + said.count("replica 1 | up") == 2,
    )
    assert [result.state for result in results] == [ReplicaState.CANCELLED] * 2
    assert sorted(said) == [f"replica {i} | {word}" for i in (0, 1) for word in ("saved", "up")]
    (late,) = run_replicas(executor, [spec(PATIENT)], timeout_s=0.3, together=False, say=said.append)
    assert late.state is ReplicaState.CANCELLED


@given(st.one_of(st.none(), st.integers(0, 255)), st.text())
def test_a_failure_is_explained_in_one_line(code: int | None, said: str) -> None:
    line = explain(code, said)
    assert line
    assert len(line.splitlines()) == 1
