"""Whether a service is well, by its page, its socket or its status file."""

from __future__ import annotations

import os
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hintloop.containers import buckets
from hintloop.containers.health import SILENT_S, problem


@contextmanager
def answering(server: socket.socket, answer: bytes) -> Iterator[None]:
    def serve() -> None:
        connection, _ = server.accept()
        with connection:
            connection.recv(4096)
            connection.sendall(answer)

    thread = threading.Thread(target=serve)
    thread.start()
    with server:
        yield
        thread.join(10)


@pytest.mark.parametrize(("status", "wrong"), [(200, None), (503, "HTTP 503")])
def test_a_page(status: int, wrong: str | None) -> None:
    server = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{server.getsockname()[1]}/health"
    with answering(server, f"HTTP/1.1 {status} -\r\nContent-Length: 0\r\n\r\n".encode()):
        assert problem(url) == wrong


@pytest.mark.parametrize(("status", "wrong"), [(200, None), (502, "HTTP 502")])
def test_a_socket(status: int, wrong: str | None) -> None:
    with tempfile.TemporaryDirectory() as folder:
        server = socket.socket(socket.AF_UNIX)
        server.bind(f"{folder}/s")
        server.listen()
        with answering(server, f"HTTP/1.1 {status} OK\r\n\r\n".encode()):
            assert problem(f"{folder}/s") == wrong


def test_a_status_file(tmp_path: Path) -> None:
    path = tmp_path / "rollout.json"
    path.write_text("{}")
    assert problem(str(path)) is None
    then = time.time() - SILENT_S - 5
    os.utime(path, (then, then))
    assert str(problem(str(path))).startswith("silent for 30")


def test_what_is_not_there(tmp_path: Path) -> None:
    for what in (str(tmp_path / "nothing"), "http://127.0.0.1:1/health"):
        with pytest.raises(OSError, match=r"No such file|refused"):
            problem(what)


def test_buckets_are_those_of_s3_uris() -> None:
    uris = ["s3://b/journal", "s3://b/weights", "s3://a", "file:///data", ""]
    assert buckets.names(uris) == ["a", "b"]
