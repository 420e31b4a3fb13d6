"""A store on a server that goes away and comes back: what its operations raise, and that writers go on."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterator
from typing import Any

import fsspec  # type: ignore[import-untyped]
import pytest
from fsspec.implementations.memory import MemoryFileSystem  # type: ignore[import-untyped]

from hintloop.cli.errors import is_expected, one_line
from hintloop.replay.episode import Episode
from hintloop.replay.journal import Journal
from hintloop.replay.storage import Store
from hintloop.replay.weights import WeightStore
from hintloop.rollout.offload import persist

Make = Callable[[int], Episode]


class Server:
    """An S3-compatible server at a port of its own, which can be stopped and started again."""

    def __init__(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port: int = free.getsockname()[1]

    def start(self) -> None:
        from moto.server import ThreadedMotoServer

        self._server: Any = ThreadedMotoServer(ip_address="127.0.0.1", port=self.port, verbose=False)
        self._server.start()

    def stop(self) -> None:
        self._server.stop()
        self._server._server.server_close()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    pytest.importorskip("moto.server", reason="needs moto, of the extra dev")
    s3fs = pytest.importorskip("s3fs", reason="needs s3fs, of the extra dev")
    made = Server()
    made.start()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{made.port}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")  # the library's own patience only takes time
    s3fs.S3FileSystem.clear_instance_cache()
    s3fs.S3FileSystem().mkdir(f"bucket-{made.port}")
    yield made
    s3fs.S3FileSystem.clear_instance_cache()
    made.stop()


OPERATIONS: dict[str, Callable[[Store], Any]] = {
    "names": lambda store: store.names(),
    "sizes": lambda store: store.sizes(),
    "exists": lambda store: store.exists("file"),
    "read": lambda store: store.read("file"),
    "read_all": lambda store: store.read_all(["file", "other"]),
    "open": lambda store: store.open("file").read(),
    "create": lambda store: store.create("new", b"x"),
    "replace": lambda store: store.replace("file", b"x"),
    "write_chunks": lambda store: store.write_chunks("new", [b"x"]),
    "write_many_chunks": lambda store: store.write_chunks("new", [bytes(50 << 20)] * 2),
    "remove": lambda store: store.remove("file"),
    "remove_all": lambda store: store.remove_all(["file", "other"]),
}


def test_a_server_that_is_away_is_a_storage_that_fails_until_it_is_back(
    server: Server, make_episode: Make
) -> None:
    uri = f"s3://bucket-{server.port}"
    store, journal = Store(f"{uri}/store"), Journal(f"{uri}/journal")
    for name in ("file", "other"):
        store.replace(name, bytes(100))
    opened = store.open("file")
    writer = journal.writer("w")
    writer.append([make_episode(0)])
    server.stop()
    for operation in OPERATIONS:
        with pytest.raises(OSError, match="onnect") as caught:
            OPERATIONS[operation](store)
        assert is_expected(caught.value), operation
        assert one_line(caught.value).startswith(f"{uri}/store: "), operation
        assert caught.value.__cause__ is not None, operation
    with pytest.raises(OSError, match="onnect"):
        opened.read()
    with pytest.raises(OSError, match="onnect"):
        WeightStore(f"{uri}/weights").latest()
    failures: list[OSError] = []

    def heard(error: OSError) -> None:
        failures.append(error)
        if len(failures) == 1:
            server.start()

    def append() -> str:
        return writer.append([make_episode(1)])

    writing = persist(append, what="writing", patience_s=60.0, on_failure=heard)
    assert asyncio.run(writing) == "w-00000001.parquet"
    assert failures
    assert journal.reader().poll() == [make_episode(0), make_episode(1)]
    assert store.read("file") == opened.read() == bytes(100)


class Failing(MemoryFileSystem):  # type: ignore[misc]
    """Whose every look at a file fails in the way of a library."""

    protocol = "failing"

    def info(self, path: str, **kwargs: Any) -> Any:
        raise RuntimeError("GET https://me:word@host/path?token=abc:\n503")

    cat_file = info


def test_the_text_is_one_line_without_secrets() -> None:
    fsspec.register_implementation("failing", Failing, clobber=True)
    store = Store("failing://me:word@place/store?token=abc")
    for look in (store.exists, store.read):
        with pytest.raises(OSError, match="503") as caught:
            look("file")
        assert str(caught.value) == "failing://place/store: GET https://host/path 503"
        assert isinstance(caught.value.__cause__, RuntimeError)
