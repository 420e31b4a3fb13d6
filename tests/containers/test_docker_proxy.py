"""The proxy before an engine that is not there: whose containers it touches, and what passes through."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("docker", reason="the extra `docker` is not installed")

from hintloop.containers.docker_proxy import Failed, Proxy
from hintloop.containers.docker_rules import MAX_BODY, OWNER, Limits
from hintloop.envs.sandbox.docker_engine import ContainerSpec, container_config

from .fake_engine import FakeEngine

DEADLINE_S = 20
LIMITS = Limits("mine", max_containers=3)
SPEC = ContainerSpec("hintloop-sandbox", None, "/workspace", 1 << 28, 1 << 26, 1.0, {"a": "b"}, ())
ATTACH = "attach?stdin=1&stdout=1&stderr=1&stream=1"


class Behind:
    """A proxy with a fake engine behind it."""

    def __init__(self, folder: Path) -> None:
        self.engine = FakeEngine()
        self.proxy = Proxy(str(folder / "engine"), LIMITS)
        self.listen = folder / "proxy"

    async def send(self, request: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_unix_connection(self.listen)
        writer.write(request)
        return reader, writer

    async def ask(self, method: str, target: str, body: object = None) -> tuple[int, str]:
        """Status and the rest of the answer."""
        data = b"" if body is None else json.dumps(body).encode()
        head = f"{method} {target} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
        reader, writer = await self.send(head.encode() + data)
        answer = (await reader.read()).decode()
        writer.close()
        return int(answer.split(" ")[1]), answer


def behind(test: Callable[[Behind], Awaitable[None]]) -> None:
    async def run(folder: Path) -> None:
        made = Behind(folder)
        engine = await made.engine.start(folder / "engine")
        proxy = await asyncio.start_unix_server(made.proxy.serve, made.listen)
        async with asyncio.timeout(DEADLINE_S), engine, proxy:
            await test(made)

    with tempfile.TemporaryDirectory() as folder:  # a socket's path is short
        asyncio.run(run(Path(folder)))


def test_a_container_is_made_started_and_removed() -> None:
    async def test(it: Behind) -> None:
        status, answer = await it.ask("POST", "/v1.41/containers/create", container_config(SPEC))
        assert status == 201
        (container,) = it.engine.containers
        assert container in answer
        assert it.engine.containers[container]["Config"]["Labels"] == {"a": "b", OWNER: "mine"}
        assert (await it.ask("POST", f"/v1.41/containers/{container}/start"))[0] == 204
        assert (await it.ask("DELETE", f"/v1.41/containers/{container}?force=True&v=True&link=False"))[
            0
        ] == 204
        assert it.engine.containers == {}

    behind(test)


def test_containers_of_others_are_not_there() -> None:
    async def test(it: Behind) -> None:
        others = [it.engine.add(1, {}), it.engine.add(2, {OWNER: "another's"})]
        for container in [*others, f"{3:064x}"]:
            for method, path in (("POST", "/start"), ("POST", f"/{ATTACH}"), ("DELETE", "")):
                status, answer = await it.ask(method, f"/containers/{container}{path}")
                assert status == 404
                assert "no such container" in answer
        assert list(it.engine.containers) == others
        assert all(seen.startswith("GET ") for seen in it.engine.seen)
        assert "another" not in (await it.ask("GET", "/containers/json?all=1"))[1]

    behind(test)


def test_a_refusal_says_why_and_the_engine_hears_nothing() -> None:
    async def test(it: Behind) -> None:
        wanted: dict[str, Any] = container_config(SPEC)
        wanted["HostConfig"]["Binds"] = ["/:/host"]
        status, answer = await it.ask("POST", "/containers/create", wanted)
        assert (status, json.loads(answer.partition("\r\n\r\n")[2])) == (
            403,
            {"message": "hintloop's proxy: HostConfig.Binds is not let through"},
        )
        assert it.engine.seen == []

    behind(test)


def test_containers_are_counted() -> None:
    async def test(it: Behind) -> None:
        for number in range(LIMITS.max_containers):
            it.engine.add(number, {OWNER: "mine"})
        it.engine.add(99, {})
        status, answer = await it.ask("POST", "/containers/create", container_config(SPEC))
        assert status == 403
        assert "3 containers already" in answer

    behind(test)


def test_input_and_output_pass_and_the_end_of_input_too() -> None:
    async def test(it: Behind) -> None:
        container = it.engine.add(1, {OWNER: "mine"})
        request = f"POST /v1.41/containers/{container}/{ATTACH} HTTP/1.1\r\nContent-Length: 0\r\n\r\n"
        reader, writer = await it.send(request.encode())
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 101 ")
        long = b"x" * 300_000
        writer.write(long)
        assert await reader.readexactly(len(long)) == long.upper()
        writer.write_eof()
        assert await reader.read() == b"bye"
        writer.close()

    behind(test)


def test_a_client_that_vanishes_ends_its_container() -> None:
    async def test(it: Behind) -> None:
        container = it.engine.add(1, {OWNER: "mine"})
        request = f"POST /containers/{container}/{ATTACH} HTTP/1.1\r\nContent-Length: 0\r\n\r\n"
        reader, writer = await it.send(request.encode())
        await reader.readuntil(b"\r\n\r\n")
        writer.transport.abort()
        await it.engine.ended.wait()
        assert it.engine.ended.is_set()

    behind(test)


@pytest.mark.parametrize(
    "request_text",
    [
        "GET /info HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        "GET /info HTTP/1.1\r\nContent-Length: 0\r\nContent-Length: 5\r\n\r\n",
        f"POST /containers/create HTTP/1.1\r\nContent-Length: {MAX_BODY + 1}\r\n\r\n",
        "POST /containers/create HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
        "GET /info HTTP/1.0\r\n\r\n",
        "GET  /info HTTP/1.1\r\n\r\n",
        "GET /info\r\n\r\n",
        "GET /info HTTP/1.1\r\nno field\r\n\r\n",
        "GET /inf\u00f6 HTTP/1.1\r\n\r\n",
        "GET /" + "x" * 70_000 + " HTTP/1.1\r\n\r\n",
    ],
)
def test_what_is_no_plain_request_is_refused(request_text: str) -> None:
    async def test(it: Behind) -> None:
        reader, writer = await it.send(request_text.encode())
        assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 403 ")
        assert it.engine.seen == []
        writer.close()

    behind(test)


def test_what_follows_a_request_is_not_passed_on() -> None:
    async def test(it: Behind) -> None:
        reader, writer = await it.send(b"GET /version HTTP/1.1\r\n\r\nGET /secrets HTTP/1.1\r\n\r\n")
        await reader.read()
        assert it.engine.seen == ["GET /version"]
        writer.close()

    behind(test)


def test_of_the_engine_only_its_runtimes_are_told() -> None:
    async def test(it: Behind) -> None:
        status, answer = await it.ask("GET", "/v1.41/info")
        assert (status, json.loads(answer.partition("\r\n\r\n")[2])) == (200, {"Runtimes": {"runc": {}}})

    behind(test)


def test_all_own_containers_are_removed_and_no_other() -> None:
    async def test(it: Behind) -> None:
        for number in range(3):
            it.engine.add(number, {OWNER: "mine"})
        other = it.engine.add(9, {OWNER: "another's"})
        assert await it.proxy.remove_all() == 3
        assert list(it.engine.containers) == [other]

    behind(test)


def test_an_engine_that_is_not_there_is_told(tmp_path: Path) -> None:
    async def test(it: Behind) -> None:
        it.proxy = Proxy(str(tmp_path / "nowhere"), LIMITS)
        server = await asyncio.start_unix_server(it.proxy.serve, it.listen.with_name("other"))
        it.listen = it.listen.with_name("other")
        async with server:
            assert (await it.ask("GET", "/version"))[0] == 502
        with pytest.raises((OSError, Failed)):
            await it.proxy.remove_all()

    behind(test)
