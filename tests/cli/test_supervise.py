"""Processes of a run: started, watched, and never left behind. The children are tiny scripts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hintloop.cli.supervise import ChildFailed, ChildSpec, Stopped, Supervisor

PATIENT = "import time\ntime.sleep(60)"
STUBBORN = "import pathlib, signal, sys, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
STUBBORN += "pathlib.Path(sys.argv[1]).write_text('up')\ntime.sleep(60)"
GRACEFUL = """
import pathlib, signal, sys, time
def end(*_):
    time.sleep(0.2)
    with open(sys.argv[2], "a") as file:
        file.write(sys.argv[3] + "\\n")
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
pathlib.Path(sys.argv[1]).write_text("up")
time.sleep(60)
"""

Child = Callable[..., ChildSpec]


@pytest.fixture
def child(tmp_path: Path) -> Child:
    def make(name: str, code: str, *arguments: object, server: bool = False) -> ChildSpec:
        command = [sys.executable, "-S", "-c", code, *map(str, arguments)]
        return ChildSpec(name, command, tmp_path / f"{name}.log", server=server)

    return make


def alive(pid: int) -> bool:
    """Whether the process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def pids(supervisor: Supervisor) -> list[int]:
    return [each.process.pid for each in supervisor._children]


def test_workers_that_end_well_are_a_success(child: Child) -> None:
    with Supervisor() as supervisor:
        supervisor.start(child("server", PATIENT, server=True))
        supervisor.start(child("worker", "print('done')"))
        supervisor.wait_end("worker")
        (server, _) = pids(supervisor)
        assert alive(server)
    assert not alive(server)


def test_a_worker_that_fails_is_named_with_the_end_of_its_log(child: Child) -> None:
    spec = child("worker", "import sys\nprint('first')\nprint('second')\nsys.exit(3)")
    spec.log.write_text("of an earlier process\n")
    with Supervisor() as supervisor:
        supervisor.start(child("other", PATIENT))
        supervisor.start(spec)
        started = pids(supervisor)
        with pytest.raises(ChildFailed, match="worker ended unexpectedly with exit status 3") as raised:
            supervisor.wait_end("other")
    assert raised.value.tail == "first\nsecond"
    assert not any(alive(pid) for pid in started)


def test_a_worker_that_is_killed_is_named_with_the_signal(child: Child) -> None:
    with Supervisor() as supervisor:
        supervisor.start(child("worker", PATIENT))
        os.kill(pids(supervisor)[0], signal.SIGKILL)
        with pytest.raises(ChildFailed, match="worker was killed by SIGKILL"):
            supervisor.wait_end("worker")


def test_a_server_must_not_end_even_with_success(child: Child) -> None:
    with Supervisor() as supervisor:
        supervisor.start(child("server", "print('bye')", server=True))
        supervisor.start(child("worker", PATIENT))
        with pytest.raises(ChildFailed, match="server ended unexpectedly with exit status 0"):
            supervisor.wait_end("worker")


def test_waiting_for_a_file_gives_its_text_or_has_a_deadline(child: Child, tmp_path: Path) -> None:
    write = "import os, sys, time\nwith open(sys.argv[1] + '.part', 'w') as file: file.write('http://x\\n')\n"
    write += "os.replace(sys.argv[1] + '.part', sys.argv[1])\ntime.sleep(60)"
    with Supervisor() as supervisor:
        supervisor.start(child("ready", write, tmp_path / "ready", server=True))
        supervisor.start(child("late", PATIENT, server=True))
        assert supervisor.wait_file("ready", tmp_path / "ready", timeout_s=10) == "http://x"
        with pytest.raises(ChildFailed, match=r"late was not ready after 0\.3 s"):
            supervisor.wait_file("late", tmp_path / "never", timeout_s=0.3)


def test_waiting_for_the_end_has_a_deadline(child: Child) -> None:
    with Supervisor() as supervisor:
        supervisor.start(child("worker", PATIENT))
        with pytest.raises(ChildFailed, match=r"worker has not ended after 0\.3 s"):
            supervisor.wait_end("worker", timeout_s=0.3)


def test_a_child_that_ignores_sigterm_is_killed_after_the_deadline(child: Child, tmp_path: Path) -> None:
    supervisor = Supervisor(stop_s=0.3)
    supervisor.start(child("worker", STUBBORN, tmp_path / "up"))
    (pid,) = pids(supervisor)
    assert wait_until((tmp_path / "up").exists)
    supervisor.stop()
    assert not alive(pid)


def test_servers_outlive_workers_when_all_are_stopped(child: Child, tmp_path: Path) -> None:
    order = tmp_path / "order"
    with Supervisor() as supervisor:
        for name, server in (("server", True), ("worker", False)):
            supervisor.start(child(name, GRACEFUL, tmp_path / f"{name}.up", order, name, server=server))
        assert wait_until(lambda: (tmp_path / "server.up").exists() and (tmp_path / "worker.up").exists())
    assert order.read_text().split() == ["worker", "server"]


def test_what_a_child_started_ends_with_it(child: Child, tmp_path: Path) -> None:
    code = "import subprocess, sys, pathlib\nchild = subprocess.Popen([sys.executable, '-S', '-c', sys.argv[1]])\n"
    code += "pathlib.Path(sys.argv[2]).write_text(str(child.pid))\nsys.exit(1)"
    with Supervisor() as supervisor:
        supervisor.start(child("worker", code, PATIENT, tmp_path / "pid"))
        with pytest.raises(ChildFailed):
            supervisor.wait_end("worker")
    pid = int((tmp_path / "pid").read_text())
    assert wait_until(lambda: not alive(pid))


@pytest.fixture
def handlers() -> Iterator[None]:
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    yield
    assert [signal.getsignal(number) for number in numbers] == before


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_all_children_in_peace(child: Child, tmp_path: Path, number: int) -> None:
    order = tmp_path / "order"
    with Supervisor() as supervisor, supervisor.signals():
        supervisor.start(child("worker", GRACEFUL, tmp_path / "up", order, "worker"))
        assert wait_until((tmp_path / "up").exists)
        os.kill(os.getpid(), number)
        with pytest.raises(Stopped):
            supervisor.wait_end("worker")
        supervisor.stop()
    assert order.read_text() == "worker\n"


@pytest.mark.usefixtures("handlers")
def test_a_second_signal_does_not_wait(child: Child, tmp_path: Path) -> None:
    def tick() -> None:
        if (tmp_path / "up").exists():
            os.kill(os.getpid(), signal.SIGINT)

    started = time.monotonic()
    with Supervisor(tick, stop_s=60) as supervisor, supervisor.signals():
        supervisor.start(child("worker", STUBBORN, tmp_path / "up"))
        with pytest.raises(Stopped):
            supervisor.wait_end("worker")
        (pid,) = pids(supervisor)
        supervisor.stop()
    assert not alive(pid)
    assert time.monotonic() - started < 20


KEEPER = """
import sys, time
from pathlib import Path
from hintloop.cli.supervise import ChildSpec, Supervisor
folder = Path(sys.argv[1])
supervisor = Supervisor()
for name in ("one", "two"):
    supervisor.start(ChildSpec(name, [sys.executable, "-S", "-c", sys.argv[2]], folder / f"{name}.log"))
text = " ".join(str(child.process.pid) for child in supervisor._children)
folder.joinpath("part").write_text(text)
folder.joinpath("part").rename(folder / "pids")
time.sleep(60)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the death signal is Linux's")
def test_sigkill_of_the_supervisor_leaves_no_child(tmp_path: Path) -> None:
    keeper = subprocess.Popen([sys.executable, "-c", KEEPER, str(tmp_path), PATIENT])
    try:
        assert wait_until((tmp_path / "pids").exists, 20)
        children = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
        assert all(alive(pid) for pid in children)
    finally:
        keeper.kill()
        keeper.wait()
    assert wait_until(lambda: not any(alive(pid) for pid in children))
