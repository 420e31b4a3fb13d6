"""The command that starts a vLLM server: what it asks of vLLM, and that it keeps it up and leaves nothing behind."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hintloop.rollout import vllm_server
from hintloop.rollout.vllm_server import CPU_OPTIONS, OPTIONS, command

FAKE = """
import http.server, os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open(sys.argv[2], "a").write(f"{os.getpid()} {child.pid}\\n")
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
"""Like vLLM: a process that answers, and one of its own that it leaves behind when it is killed."""
KEEPER = """
import subprocess, sys
from functools import partial
from hintloop.rollout import vllm_server as it
it.PAUSE_S, it.SILENT_S, it.STOP_S = 0.1, 10.0, 3.0
url = f"http://127.0.0.1:{sys.argv[2]}"
start = partial(it.start, [sys.executable, "-c", *sys.argv[1:]], {})
sys.exit(it.keep_up(start, partial(it.answers, url), name=url, start_s=10.0))
"""
VAIN = """
import os, sys, time
pids = open(sys.argv[2]).readlines() if os.path.exists(sys.argv[2]) else []
if len(pids) in {places}:
    open(sys.argv[2], "a").write(f"{{os.getpid()}}\\n")
    {what}
"""
"""Before ``FAKE``: what the starts at ``places`` do."""
DEADLINE_S = 120.0


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def starts(path: Path) -> list[list[int]]:
    """Pids of the server and its child, for each start."""
    lines = path.read_text().splitlines() if path.exists() else []
    return [[int(pid) for pid in line.split()] for line in lines]


@pytest.fixture
def port() -> int:
    """A free port that nobody who asks for any port is given, so that a server gets it again later."""
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.randrange(max(1024, lowest - 10_000), lowest)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


@contextlib.contextmanager
def keeper(program: str, port: int, pids: Path) -> Iterator[subprocess.Popen[str]]:
    """What keeps the server ``program`` up; it and all that it started end with the block."""
    words = [sys.executable, "-c", KEEPER, program, str(port), str(pids)]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as process:
        watchdog = threading.Timer(DEADLINE_S, process.kill)  # so that no line is waited for without end
        watchdog.start()
        try:
            yield process
        finally:
            watchdog.cancel()
            process.kill()
            for pid in (pid for start in starts(pids) for pid in start if alive(pid)):
                os.kill(pid, signal.SIGKILL)


def said(process: subprocess.Popen[str], what: str) -> str:
    """The next line with ``what`` in it."""
    assert process.stderr
    for line in process.stderr:
        if what in line:
            return line
    raise AssertionError(f"it ended without saying {what!r}")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_killed_server_is_started_again_and_nothing_outlives_the_command(
    number: signal.Signals, port: int, tmp_path: Path
) -> None:
    pids = tmp_path / "pids"
    with keeper(FAKE, port, pids) as process:
        said(process, "is ready")
        server, child = starts(pids)[0]
        os.kill(server, signal.SIGKILL)
        said(process, "is started again")
        said(process, "is ready")
        assert not alive(child)
        server, child = starts(pids)[1]
        process.send_signal(number)
        until(lambda: not alive(server))
        if (
            number == signal.SIGTERM
        ):  # a command that is killed can but tell vLLM to end, which then ends its own
            assert process.wait(DEADLINE_S) == 0
            until(lambda: not alive(child))


def test_a_server_that_hangs_is_started_again(port: int, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    with keeper(FAKE, port, pids) as process:
        said(process, "is ready")
        server = starts(pids)[0][0]
        os.kill(server, signal.SIGSTOP)
        said(process, "has not answered for 10 s")
        said(process, "is ready")
        until(lambda: not alive(server))
        process.terminate()
        assert process.wait(DEADLINE_S) == 0


@pytest.mark.parametrize("what", ["raise SystemExit(7)", "time.sleep(600)"])
def test_a_server_that_was_up_and_whose_next_start_is_in_vain_is_tried_again(
    what: str, port: int, tmp_path: Path
) -> None:
    """Its port or memory may be taken for a while, or the start hangs."""
    pids = tmp_path / "pids"
    with keeper(VAIN.format(places="(1,)", what=what) + FAKE, port, pids) as process:
        said(process, "is ready")
        os.kill(starts(pids)[0][0], signal.SIGKILL)
        said(process, "is started again")
        said(process, "is started again")
        said(process, "is ready")
        assert len(starts(pids)) == 3
        assert not alive(starts(pids)[1][0])
        process.terminate()
        assert process.wait(DEADLINE_S) == 0


def test_a_server_that_was_up_is_given_up_after_some_starts_in_vain(port: int, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    program = VAIN.format(places="range(1, 99)", what="raise SystemExit(7)") + FAKE
    with keeper(program, port, pids) as process:
        said(process, "is ready")
        os.kill(starts(pids)[0][0], signal.SIGKILL)
        said(process, "did not come up (exit status 7)")
        assert process.wait(DEADLINE_S) == 7
        assert len(starts(pids)) == 1 + vllm_server.STARTS


def test_a_server_that_never_comes_up_is_not_tried_again(port: int, tmp_path: Path) -> None:
    with keeper("raise SystemExit(7)", port, tmp_path / "pids") as process:
        said(process, "did not come up (exit status 7)")
        assert process.wait(DEADLINE_S) == 7


def test_what_the_loop_needs_is_asked_of_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_server, "version", lambda name: "0.33.0")
    words = command("some/model", on_cpu=False)
    assert words[1:5] == ["-m", "vllm.entrypoints.cli.main", "serve", "some/model"]
    assert "--enable-scale-out" in words
    assert all(words[words.index(name) + 1] == value for name, value in OPTIONS.items())
    assert not {"--enforce-eager", *CPU_OPTIONS} & set(words)
    assert {"--enforce-eager", *CPU_OPTIONS} <= set(command("some/model", on_cpu=True))
    assert "--enable-lora" not in words


@pytest.mark.parametrize(("rank", "room"), [(1, "1"), (4, "8"), (16, "16"), (17, "32")])
def test_a_server_for_adapters_has_room_for_their_rank(
    monkeypatch: pytest.MonkeyPatch, rank: int, room: str
) -> None:
    monkeypatch.setattr(vllm_server, "version", lambda name: "0.33.0")
    words = command("some/model", on_cpu=False, lora_rank=rank)
    assert "--enable-lora" in words
    assert words[words.index("--max-lora-rank") + 1] == room
    assert int(words[words.index("--max-loras") + 1]) == vllm_server.ADAPTER_SLOTS > 1


def test_a_rank_that_vllm_cannot_have_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        vllm_server.main(["some/model", "--lora-rank", "600"])
    assert "--lora-rank is from 0 to 512" in capsys.readouterr().err


def test_an_address_that_is_taken_is_refused(
    port: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with subprocess.Popen([sys.executable, "-c", FAKE, str(port), str(tmp_path / "pids")]) as process:
        try:
            until(lambda: vllm_server.answers(f"http://127.0.0.1:{port}"))
            with pytest.raises(SystemExit):
                vllm_server.main(["some/model", "--port", str(port)])
        finally:
            os.kill(starts(tmp_path / "pids")[0][1], signal.SIGKILL)
            process.kill()
    assert "answers at" in capsys.readouterr().err
