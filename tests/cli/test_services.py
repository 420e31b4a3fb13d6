"""What a part does beside its work when it is a service: it finds servers by name, and tells of the run."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import pytest

from hintloop.cli import services
from hintloop.cli.config import load_config
from hintloop.cli.runfolder import RunFolder

FOUND = "getaddrinfo"


def named(monkeypatch: pytest.MonkeyPatch, *hosts: str) -> None:
    rows = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, 8000)) for host in hosts]
    monkeypatch.setattr(socket, FOUND, lambda *_, **__: rows)


def test_a_name_is_a_server_at_each_of_its_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    named(monkeypatch, "10.0.0.2", "10.0.0.1", "10.0.0.2", "fd00::1")
    assert services.addresses("http://engine:8000") == [
        "http://10.0.0.1:8000",
        "http://10.0.0.2:8000",
        "http://[fd00::1]:8000",
    ]


def test_a_name_without_an_address_has_no_servers() -> None:
    assert services.addresses("http://no-such-name.invalid:8000") == []


def test_a_name_of_several_servers_is_spread_over_them(monkeypatch: pytest.MonkeyPatch) -> None:
    named(monkeypatch, "10.0.0.1")
    assert services.spread(["http://env:8000"]) == ["http://env:8000"]
    named(monkeypatch, "10.0.0.1", "10.0.0.2")
    assert services.spread(["ws://env:8000"]) == ["ws://10.0.0.1:8000", "ws://10.0.0.2:8000", "ws://env:8000"]


def test_the_roster_follows_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(services, "LOOK_S", 0.01)
    roster = tmp_path / "engines.txt"
    roster.write_text("http://of-an-earlier-time:1\n")
    named(monkeypatch)
    with services.servers_by_name("http://engine:8000", roster):
        assert not roster.exists()
        for hosts in (["10.0.0.1"], ["10.0.0.1", "10.0.0.2"], ["10.0.0.2"]):
            named(monkeypatch, *hosts)
            expected = "".join(f"http://{host}:8000\n" for host in hosts)
            deadline = time.monotonic() + 10
            while not (roster.exists() and roster.read_text() == expected):
                assert time.monotonic() < deadline
                time.sleep(0.01)
        named(monkeypatch)  # all are starting again
        time.sleep(0.05)
        assert roster.read_text() == "http://10.0.0.2:8000\n"


def test_progress_is_told_in_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(services, "TICK_S", 0.01)
    told = ""
    with services.progress(RunFolder(tmp_path), load_config(preset="smoke")):
        deadline = time.monotonic() + 60
        while not told.endswith("\n"):
            assert time.monotonic() < deadline
            time.sleep(0.01)
            told += capsys.readouterr().err
    (line,) = (told + capsys.readouterr().err).splitlines()
    assert "step 0/8" in line
