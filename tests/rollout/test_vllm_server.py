"""The command that starts a vLLM server: what it asks of vLLM, and that it keeps it up and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hintloop.rollout import vllm_server
from hintloop.rollout.vllm_server import CPU_OPTIONS, OPTIONS, command

FAKE = """
import http.server, os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
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
it.PAUSE_S, it.SILENT_S, it.STOP_S = 0.1, 3.0, 3.0
url = f"http://127.0.0.1:{sys.argv[2]}"
start = partial(it.start, [sys.executable, "-c", *sys.argv[1:]], {})
sys.exit(it.keep_up(start, partial(it.answers, url), name=url))
"""


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
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
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


def keeper(program: str, port: int, path: Path) -> subprocess.Popen[bytes]:
    words = [sys.executable, "-c", KEEPER, program, str(port), str(path)]
    return subprocess.Popen(words, stderr=subprocess.PIPE)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_killed_server_is_started_again_and_nothing_outlives_the_command(
    number: signal.Signals, port: int, tmp_path: Path
) -> None:
    pids = tmp_path / "pids"
    with keeper(FAKE, port, pids) as process:
        try:
            until(lambda: len(starts(pids)) == 1 and vllm_server.answers(f"http://127.0.0.1:{port}"))
            time.sleep(2 * vllm_server.POLL_S)  # it has seen that, too
            server, child = starts(pids)[0]
            os.kill(server, signal.SIGKILL)
            until(lambda: len(starts(pids)) == 2)
            assert not alive(child)
            process.send_signal(number)
            until(lambda: not alive(starts(pids)[1][0]))
            if (
                number == signal.SIGTERM
            ):  # a command that is killed can but tell vLLM to end, which then ends its own
                assert process.wait(30) == 0
                assert not alive(starts(pids)[1][1])
        finally:
            process.kill()
            for pid in (pid for start in starts(pids) for pid in start if alive(pid)):
                os.kill(pid, signal.SIGKILL)


def test_a_server_that_hangs_is_started_again(port: int, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    with keeper(FAKE, port, pids) as process:
        try:
            until(lambda: len(starts(pids)) == 1 and vllm_server.answers(f"http://127.0.0.1:{port}"))
            time.sleep(2 * vllm_server.POLL_S)
            server = starts(pids)[0][0]
            os.kill(server, signal.SIGSTOP)
            until(lambda: len(starts(pids)) == 2)
            assert not alive(server)
            process.terminate()
            assert process.wait(30) == 0
        finally:
            process.kill()
            for pid in (pid for start in starts(pids) for pid in start if alive(pid)):
                os.kill(pid, signal.SIGKILL)


def test_a_server_that_never_comes_up_is_not_tried_again(port: int, tmp_path: Path) -> None:
    with keeper("raise SystemExit(7)", port, tmp_path / "pids") as process:
        _, said = process.communicate(timeout=30)
    assert process.returncode == 7
    assert b"did not come up (exit status 7)" in said


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
