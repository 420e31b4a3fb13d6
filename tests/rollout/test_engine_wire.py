"""The lean HTTP transport, and what is taken for an answer."""

from __future__ import annotations

import asyncio
import contextlib
import copy
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx
import pytest

from hintloop.rollout.engines.answer import BadAnswer, Standing, Stream
from hintloop.rollout.engines.wire import LeanTransport

DEADLINE_S = 10.0
OK = b"HTTP/1.1 200 OK\r\n"


@contextlib.asynccontextmanager
async def server(*answers: bytes) -> AsyncIterator[tuple[str, list[int]]]:
    """Gives the answers one after the other, each to one request, as they are; and how many came per connection."""
    left = list(answers)
    counts: list[int] = []
    writers: list[asyncio.StreamWriter] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        counts.append(0)
        writers.append(writer)
        place = len(counts) - 1
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length")]
                if length:
                    await reader.readexactly(int(length[0].split(b":")[1]))
                counts[place] += 1
                answer = left.pop(0)
                writer.write(answer)
                await writer.drain()
                if b"content-length" not in answer and not answer.endswith(b"0\r\n\r\n"):
                    break  # lower case is used by the answers that are complete
        writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}", counts
    finally:
        listening.close()
        for writer in writers:
            writer.transport.abort()
        await asyncio.sleep(0.01)


def run(check: Callable[[httpx.AsyncClient], Awaitable[None]]) -> None:
    async def whole() -> None:
        transport = LeanTransport(connect_s=1.0)
        async with (
            asyncio.timeout(DEADLINE_S),
            httpx.AsyncClient(transport=transport, timeout=None, trust_env=False) as client,
        ):
            await check(client)

    asyncio.run(whole())


def test_a_connection_serves_one_request_after_the_other() -> None:
    async def check(client: httpx.AsyncClient) -> None:
        start = OK + b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2;x=y\r\nde\r\n0\r\n"
        sized = OK + b"content-length: 4\r\n\r\nfour"
        empty = b"HTTP/1.1 503 Busy\r\ncontent-length: 0\r\n\r\n"
        async with server(start + b"\r\n", sized, empty) as (url, counts):
            assert (await client.post(url, json={"a": 1})).text == "abcde"
            assert (await client.get(url + "/path?q=1")).text == "four"
            assert (await client.get(url)).status_code == 503
            assert counts == [3]
        async with server(start + b"Trailer: 1\r\n\r\n") as (url, counts):
            assert (await client.get(url)).text == "abcde"

    run(check)


def test_what_a_server_closes_or_breaks_is_not_used_again() -> None:
    async def check(client: httpx.AsyncClient) -> None:
        async with server(OK + b"\r\nuntil the end", OK + b"content-length: 2\r\n\r\nok") as (url, counts):
            assert (await client.get(url)).text == "until the end"
            assert (await client.get(url)).text == "ok"
            assert counts == [1, 1]

    run(check)


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"SSH-2.0-x\r\n\r\n",
        OK + b"Transfer-Encoding: chunked\r\n\r\n9\r\nabc",
        OK + b"Transfer-Encoding: chunked\r\n\r\nzz\r\nabc\r\n",
        OK + b"Transfer-Encoding: chunked\r\n\r\nfffffffffff\r\nabc\r\n",
        OK + b"Content-Length: 9\r\n\r\nabc",
        OK + b"Content-Length: -1\r\n\r\nabc",
    ],
)
def test_half_an_answer_is_an_error(answer: bytes) -> None:
    async def check(client: httpx.AsyncClient) -> None:
        async with server(answer) as (url, _):
            with pytest.raises(httpx.RemoteProtocolError):
                await client.get(url)

    run(check)


def test_nobody_there_is_an_error() -> None:
    async def check(client: httpx.AsyncClient) -> None:
        async with server() as (url, _):
            pass
        with pytest.raises(httpx.ConnectError):
            await client.get(url)

    run(check)


def chunk(ids: list[int], reason: str | None = None, spans: Any = None) -> dict[str, Any]:
    content = [{"token_id": token, "logprob": -1.5} for token in ids]
    choice = {"token_ids": ids, "logprobs": {"content": content}, "finish_reason": reason}
    return {"choices": [choice | {"weight_versions": spans}]}


def span(version: str, start: int, end: int) -> dict[str, Any]:
    return {"version": version, "start": start, "end": end}


def standing(*versions: int) -> Standing:
    made = Standing()
    for version in versions:
        made.begin()
        made.admit(version, str(version))
    return made


def test_a_whole_answer_is_the_sum_of_its_pieces() -> None:
    stream = Stream(standing(3, 4), 9, frozenset({7}))
    stream.add(chunk([1, 2]))
    stream.add(chunk([3, 7], "stop", [span("3", 0, 1), span("4", 1, 4)]))
    piece = asyncio.run(stream.piece("", gone=False))
    assert (piece.token_ids, piece.versions, piece.finish_reason) == ((1, 2, 3, 7), (3, 4, 4, 4), "stop")


@pytest.mark.parametrize(
    ("last", "why"),
    [
        (chunk([7], "length", [span("3", 0, 2)]) | {"error": {"message": "dead"}}, "dead"),
        (chunk([7], "length", [span("3", 0, 1)]), "1 with a version"),
        (chunk([7], "stop", [span("3", 0, 1), span("4", 2, 3)]), "gaps"),
        (chunk([2, 3, 4, 5], "length", [span("3", 0, 5)]), "5 tokens of 4"),
        (chunk([2], "stop", [span("3", 0, 2)]), "the last token"),
        (chunk([7], "length", [span("3", 0, 2)]), "the last token"),
        ({"choices": [{"token_ids": [2]}]}, "cannot be read"),
        ({}, "cannot be read"),
        ([], "cannot be read"),
    ],
)
def test_an_answer_that_cannot_be_right_is_refused(last: Any, why: str) -> None:
    stream = Stream(standing(3), 4, frozenset({7}))
    stream.add(chunk([1]))
    with pytest.raises(BadAnswer, match=why):
        stream.add(last)


@pytest.mark.parametrize("logprob", [-9999.0, 0.5, float("nan"), float("-inf"), None, "x"])
def test_a_log_probability_that_cannot_be_is_refused(logprob: Any) -> None:
    event = copy.deepcopy(chunk([1, 2]))
    event["choices"][0]["logprobs"]["content"][1]["logprob"] = logprob
    with pytest.raises(BadAnswer):
        Stream(standing(3), 4, frozenset()).add(event)


def test_tokens_of_weights_that_failed_their_check_never_count() -> None:
    """Version 4 was refused first, and verified after another load: an old answer may be of either."""
    server = standing(3)
    old = Stream(server, 9, frozenset())
    server.begin()
    server.refuse("4")
    server.begin()
    server.admit(4, "4")
    new = Stream(server, 9, frozenset())
    for stream in (old, new):
        stream.add(chunk([1, 2, 3], "length", [span("3", 0, 1), span("4", 1, 3)]))
    kept = asyncio.run(old.piece("", gone=False))
    assert (kept.token_ids, kept.finish_reason, kept.gone) == ((1,), "", True)
    assert asyncio.run(new.piece("", gone=False)).token_ids == (1, 2, 3)


def test_an_answer_waits_for_the_check_of_its_weights() -> None:
    async def whole() -> None:
        server = standing(3)
        stream = Stream(server, 9, frozenset())
        server.begin()
        stream.add(chunk([1, 2], "length", [span("3", 0, 1), span("4", 1, 2)]))
        waiting = asyncio.create_task(stream.piece("", gone=False))
        await asyncio.sleep(0.01)
        assert not waiting.done()
        server.admit(4, "4")
        assert (await waiting).versions == (3, 4)

    asyncio.run(whole())


def test_a_cut_answer_counts_as_far_as_the_server_was_seen_with_the_version() -> None:
    server = standing(3)
    unseen, seen = Stream(server, 9, frozenset()), Stream(server, 9, frozenset())
    seen.add(chunk([1, 2]))
    server.confirmed_at = float("inf")
    seen.add(chunk([3]))
    server.begin()
    seen.add(chunk([4]))
    for stream, kept in ((unseen, ()), (seen, (1, 2, 3))):
        piece = asyncio.run(stream.piece("cut", gone=True))
        assert (piece.token_ids, piece.versions) == (kept, (3,) * len(kept))
        assert (piece.problem, piece.gone, piece.finish_reason) == ("cut", True, "")


def test_a_server_that_errs_once_is_believed_nothing() -> None:
    """Unlike one that says that it failed: what it sampled before stands."""
    for event, kept in (({"error": "the engine is dead"}, (1,)), (chunk([2], "stop", []), ())):
        server = standing(3)
        stream = Stream(server, 9, frozenset())
        stream.add(chunk([1]))
        server.confirmed_at = float("inf")
        with pytest.raises(BadAnswer):
            stream.add(event)
        assert asyncio.run(stream.piece("broken", gone=True)).token_ids == kept
