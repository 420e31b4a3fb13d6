"""Answers on disk: the same question is paid once, whatever the disk and the other processes do."""

from __future__ import annotations

import asyncio
import json
import os
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hintloop.envs.models import ToolCall
from hintloop.rollout.answer_cache import STALE_S, AnswerCache, cache_key
from hintloop.rollout.chat_api import calls_text, read_calls
from hintloop.rollout.config import TeacherSpec
from hintloop.rollout.teachers import Teacher, TeacherAnswer

from .teacher_server import Reply, says, teaching

CALL = ToolCall(name="read_file", arguments={"path": "é.py", "line": 3})
USAGE = {"prompt_tokens": 1000, "completion_tokens": 10}
KEYS = [f"{number:02x}" + "0" * 62 for number in range(20)]


TEXT = calls_text([CALL])
SIZE = len(TEXT.encode())


def ask_together(teacher_url: str, folder: Path, texts: list[str], **spec: Any) -> list[TeacherAnswer]:
    """One question per text, all at the same time, by a process that starts now."""

    async def run() -> list[TeacherAnswer]:
        made = TeacherSpec(name="one", base_url=teacher_url, model="m", usd_per_mtok_in=1.0, **spec)
        async with httpx.AsyncClient() as client:
            cache = AnswerCache(folder, max_bytes=10_000)
            teacher = Teacher(made, client, timeout_s=20, attempts=1, in_flight=8, cache=cache)
            questions = [teacher.ask([{"role": "user", "content": text}], []) for text in texts]
            return list(await asyncio.gather(*questions))

    return asyncio.run(run())


def test_the_same_question_is_paid_once_also_when_asked_at_the_same_time(tmp_path: Path) -> None:
    with teaching(lambda number, body: says(CALL, USAGE)) as server:
        first = ask_together(server.url, tmp_path, ["a", "a", "a", "b"])
        again = ask_together(server.url, tmp_path, ["b", "a"])
        assert len(server.requests) == 2
    assert [answer.calls for answer in first + again] == [(CALL,)] * 6
    assert sorted(answer.cost_usd for answer in first) == [0, 0, 0.001, 0.001]
    assert sum(answer.cached for answer in first) == 2
    assert [(answer.cost_usd, answer.cached) for answer in again] == [(0.0, True)] * 2


def test_another_setting_is_another_question(tmp_path: Path) -> None:
    with teaching(lambda number, body: says(CALL)) as server:
        ask_together(server.url, tmp_path, ["a"])
        ask_together(server.url, tmp_path, ["a"], max_answer_tokens=7)
        assert [body["max_tokens"] for body in server.requests] == [2048, 7]


def test_what_is_no_answer_is_not_kept(tmp_path: Path) -> None:
    replies = [Reply(b"<html>"), says(None), says(CALL)]
    with teaching(lambda number, body: replies[number]) as server:
        given = [ask_together(server.url, tmp_path, ["a"])[0] for _ in range(4)]
    assert [answer.calls for answer in given] == [(), (), (CALL,), (CALL,)]


def test_the_key_is_in_no_file_of_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEACHER_KEY", "sk-secret")
    with teaching(lambda number, body: says(CALL)) as server:
        ask_together(server.url, tmp_path, ["a"], api_key_env="TEACHER_KEY")
        assert server.headers[0]["authorization"] == "Bearer sk-secret"
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) == 1
    assert all(b"secret" not in path.read_bytes() and "secret" not in str(path) for path in files)


@given(st.lists(st.sampled_from(KEYS), max_size=40), st.integers(0, 5))
def test_the_size_is_bounded_and_what_was_used_last_stays(
    tmp_path_factory: pytest.TempPathFactory, used: list[str], room: int
) -> None:
    folder = tmp_path_factory.mktemp("cache")
    cache = AnswerCache(folder, max_bytes=room * SIZE)
    order: list[str] = []
    for key in used:
        if cache.get(key, read_calls) is None:
            cache.put(key, TEXT)
        order = [other for other in order if other != key] + [key]
    kept = {path.stem for path in folder.glob("??/*.json")}
    assert kept == set(order[len(order) - min(room, len(order)) :])
    assert cache.snapshot()["bytes"] == len(kept) * SIZE <= room * SIZE
    assert cache.counts.evicted == cache.counts.misses * (room > 0) - len(kept)


def test_the_order_of_use_survives_a_restart(tmp_path: Path) -> None:
    cache = AnswerCache(tmp_path, max_bytes=10_000)
    for age, key in enumerate(KEYS[:3]):
        cache.put(key, TEXT)
        os.utime(cache._path(key), (1000 + age, 1000 + age))
    assert cache.get(KEYS[0], read_calls) == (CALL,)
    small = AnswerCache(tmp_path, max_bytes=2 * SIZE)
    assert [small.get(key, read_calls) for key in KEYS[:3]] == [(CALL,), None, (CALL,)]
    assert small.counts.evicted == 1


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b'[{"name": 3}]', b'[{"key": 1}]', b'{"name": "x", "arguments": {}}', b"\xff"],
)
def test_a_file_that_is_no_answer_is_a_miss_and_is_replaced(tmp_path: Path, content: bytes) -> None:
    cache = AnswerCache(tmp_path, max_bytes=10_000)
    cache.put(KEYS[0], TEXT)
    cache._path(KEYS[0]).write_bytes(content)
    assert cache.get(KEYS[0], read_calls) is None
    cache.put(KEYS[0], TEXT)
    assert cache.get(KEYS[0], read_calls) == (CALL,)
    assert cache.snapshot()["bytes"] == SIZE


def test_a_folder_that_cannot_be_written_costs_nothing_but_the_entry(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    cache = AnswerCache(tmp_path / "file", max_bytes=10_000)
    cache.put(KEYS[0], TEXT)
    assert cache.get(KEYS[0], read_calls) is None
    assert cache.counts.not_written == 1


def test_a_disk_that_hangs_costs_the_answers_that_it_keeps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hintloop.rollout.answer_cache.DISK_S", 0.2)
    cache = AnswerCache(tmp_path, max_bytes=10_000)
    cache.put(KEYS[0], TEXT)

    async def run() -> None:
        with cache._lock:  # as a read that does not come back has it
            assert await cache.find(KEYS[0], read_calls) is None
            started = time.monotonic()
            for _ in range(100):
                assert await cache.find(KEYS[0], read_calls) is None
                await cache.keep(KEYS[1], TEXT)
            assert time.monotonic() - started < 10
        async with asyncio.timeout(60):
            while await cache.find(KEYS[0], read_calls) is None:  # noqa: ASYNC110 - nothing announces it
                await asyncio.sleep(0.01)

    asyncio.run(run())


def test_what_a_dead_process_left_half_written_goes(tmp_path: Path) -> None:
    (tmp_path / "00").mkdir()
    old, new = tmp_path / "00" / ".a.1.part", tmp_path / "00" / ".b.2.part"
    for path in (old, new):
        path.write_bytes(b"{")
    os.utime(old, (0, old.stat().st_mtime - STALE_S - 1))
    AnswerCache(tmp_path, max_bytes=10_000)
    assert (old.exists(), new.exists()) == (False, True)


def test_the_key_of_a_question_depends_on_all_of_it_and_on_no_order() -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "tools": [], "max_tokens": 5}
    assert cache_key("u", body) == cache_key("u", json.loads(json.dumps(dict(reversed(body.items())))))
    others = [{**body, name: "other"} for name in body]
    assert len({cache_key("u", one) for one in [body, *others]} | {cache_key("v", body)}) == 6
