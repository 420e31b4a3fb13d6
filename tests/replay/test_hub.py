"""Exports on the hub: one commit with what the export wrote, from a server on loopback that speaks its language."""

from __future__ import annotations

import base64
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from hintloop.replay.export.hub import ENDPOINT, TOKEN, NotPushed, push

pytest.importorskip("huggingface_hub")
SECRET = "hf_" + "s3cret" * 6


@dataclass
class Hub:
    url: str = ""
    status: int = 200
    made: list[dict[str, Any]] = field(default_factory=list)
    files: dict[str, bytes] = field(default_factory=dict)
    tokens: set[str | None] = field(default_factory=set)


@contextmanager
def hub_at_home() -> Iterator[Hub]:
    """Takes small files; everything in it is a data set."""
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"] or 0))
            hub.tokens.add(self.headers["authorization"])
            if hub.status != 200:
                return self.reply({"error": f"no, {SECRET} is not welcome"}, hub.status)
            if self.path == "/api/repos/create":
                hub.made.append(json.loads(body))
                return self.reply({"url": f"{hub.url}/datasets/me/set"})
            if self.path == "/api/validate-yaml":  # of the card's header
                return self.reply({"warnings": [], "errors": []})
            if "/preupload/" in self.path:
                asked = json.loads(body)["files"]
                kinds = [
                    {"path": each["path"], "uploadMode": "regular", "shouldIgnore": False} for each in asked
                ]
                return self.reply({"files": kinds})
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    hub.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            address = f"{hub.url}/datasets/me/set/commit/{'0' * 40}"
            return self.reply({"commitUrl": address, "commitOid": "0" * 40, "hookOutput": ""})

        def do_GET(self) -> None:
            self.reply({"id": "me/set", "sha": "0" * 40, "siblings": []})

        def reply(self, told: Any, status: int = 200) -> None:
            data = json.dumps(told).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            """Nothing is printed."""

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{http.server_port}"
    thread = threading.Thread(target=http.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        http.shutdown()
        thread.join(10)
        http.server_close()


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with hub_at_home() as made:
        monkeypatch.setenv(ENDPOINT, made.url)
        monkeypatch.setenv(TOKEN, SECRET)
        yield made


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    """What an export looks like, and a file beside it that is somebody's own."""
    folder = tmp_path / "set"
    (folder / "sft").mkdir(parents=True)
    (folder / "sft" / "train.parquet").write_bytes(b"PAR1 rows PAR1")
    (folder / "README.md").write_text("---\n---\n# Turns\n")
    (folder / "notes.txt").write_text("mine")
    return folder


def test_what_was_exported_is_pushed_to_a_private_data_set(hub: Hub, exported: Path) -> None:
    assert push(exported, "me/set") == f"{hub.url}/datasets/me/set"
    (made,) = hub.made
    assert made["type"] == "dataset"
    assert made.get("visibility") == "private" or made.get("private") is True  # by the client's version
    assert hub.files.keys() == {"README.md", "sft/train.parquet"}
    assert hub.files["sft/train.parquet"] == b"PAR1 rows PAR1"
    assert hub.tokens == {f"Bearer {SECRET}"}


def test_trajectories_are_pushed_as_well(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("{}")
    push(tmp_path, "me/set")
    assert hub.files == {"a.json": b"{}"}


@pytest.mark.parametrize("value", [None, "", "  "])
def test_without_a_token_nothing_is_sent(
    hub: Hub, exported: Path, value: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(TOKEN) if value is None else monkeypatch.setenv(TOKEN, value)
    with pytest.raises(NotPushed, match="set the environment variable HF_TOKEN"):
        push(exported, "me/set")
    assert not hub.tokens


def test_a_folder_without_an_export_is_not_pushed(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(NotPushed, match="holds no export"):
        push(tmp_path, "me/set")
    assert not hub.tokens


def test_a_hub_that_cannot_be_reached_is_one_line(
    hub: Hub, exported: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # nobody listens there
        monkeypatch.setenv(ENDPOINT, f"http://127.0.0.1:{taken.getsockname()[1]}")
        with pytest.raises(NotPushed, match="did not take it"):
            push(exported, "me/set")


def test_a_refusal_is_one_line_without_the_token(
    hub: Hub, exported: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    hub.status = 403
    with pytest.raises(NotPushed, match="the hub did not take it") as caught:
        push(exported, "me/set")
    said = capfd.readouterr()
    assert "\n" not in str(caught.value)
    assert SECRET not in f"{caught.value}{caplog.text}{said.out}{said.err}"
    with pytest.raises(NotPushed, match="did not take it"):
        push(exported, "not/a/repo")
