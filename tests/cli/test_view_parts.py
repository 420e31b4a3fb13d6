"""What the pages of a run are made of: numbers in little memory, the list of episodes, text, and charts."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hintloop.cli.runfolder import RunFolder
from hintloop.cli.view import data as view_data
from hintloop.cli.view import episodes as view_episodes
from hintloop.cli.view import server
from hintloop.cli.view.charts import Series, chart, ticks
from hintloop.cli.view.conversation import TURNS, conversation
from hintloop.cli.view.data import ERROR, Follower, Track
from hintloop.cli.view.episodes import EpisodeList, NotThere
from hintloop.cli.view.text import clip, visible
from hintloop.replay.episode import Outcome, Turn
from hintloop.replay.journal import Journal

NUMBERS = st.floats(-1e17, 1e17)


@pytest.fixture(autouse=True)
def _no_listing_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is interrupted for a while would be used again, and a new segment not be on the page."""
    monkeypatch.setattr(view_episodes, "SLOW_LISTING_S", math.inf)


def test_pages_of_the_list_hold_each_episode_once(run: RunFolder) -> None:
    found = EpisodeList(Journal(run.journal))
    ids, before = [], None
    while True:
        page = found.page(before=before, size=3)
        ids += [row.episode_id for row in page.rows]
        if page.older is None:
            break
        before = page.older
    assert ids == ["g1-1", "g1-0", "g0-1", "g0-0"]


def test_a_search_that_takes_long_says_where_to_go_on(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(view_episodes, "SEARCH_S", 0.0)
    found = EpisodeList(Journal(run.journal))
    first = found.page(find="G0-", outcome="failed")
    assert (first.rows, first.looked_at) == ((), 2)
    assert first.older is not None
    second = found.page(find="G0-", outcome="failed", before=first.older)
    second = second if second.rows else found.page(find="G0-", outcome="failed", before=second.older)
    assert [row.episode_id for row in second.rows] == ["g0-0"]


def test_rows_are_kept_up_to_a_bound_and_dropped_with_their_journal(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(view_episodes, "CACHE_ROWS", 3)
    found = EpisodeList(Journal(run.journal))
    assert len(found.page().rows) == 4
    assert sum(map(len, found._cache.values())) <= 3
    for path in run.journal.iterdir():
        path.unlink()
    assert found.page().rows == ()
    assert not found._cache


def test_a_long_episode_is_shown_in_parts(run: RunFolder) -> None:
    turns = tuple(Turn("user", 0, 0, "x" * 50_000) for _ in range(TURNS + 5))
    episode = replace(
        Journal(run.journal).read("rollout-00000000.parquet")[0], turns=turns, hint_sites=(), pairs=()
    )
    first = conversation(episode, (), here=0)
    assert (len(first["messages"]), first["later"]) == (TURNS, TURNS)
    assert sum(len(message.action.text) for message in first["messages"]) < 1_000_000
    rest = conversation(episode, (), here=0, start=TURNS)
    assert (len(rest["messages"]), rest["later"], rest["earlier"]) == (5, None, 0)
    with pytest.raises(NotThere):
        conversation(episode, (), here=0, start=TURNS + 5)


def test_a_long_file_of_metrics_takes_little_memory(tmp_path: Path) -> None:
    path, n = tmp_path / "m.jsonl", 5000
    lines = ({"time": i, "solved": i % 3, f"other{i}": 1, "errors": {f"kind{i % 5}": 1}} for i in range(n))
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    track = Track(path)
    track.refresh()
    assert track.lines == n
    assert track.total("solved") == sum(i % 3 for i in range(n))
    assert track.total(f"{ERROR}kind0") == n / 5
    assert len(track.buckets) <= view_data.MAX_BUCKETS
    assert len(track.sums) <= view_data.MAX_NAMES
    assert sum(bucket["solved"].total for bucket in track.buckets) == track.total("solved")
    times = [bucket["time"].mean for bucket in track.buckets]
    assert times == sorted(times)


@given(st.lists(st.one_of(st.integers(0, 9).map(str), st.text(max_size=12))), st.integers(1, 9))
def test_a_follower_gives_each_whole_line_once(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], size: int
) -> None:
    path = tmp_path_factory.mktemp("follow") / "lines"
    whole = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    follower, found = Follower(path), []
    for at in range(0, len(whole) + size, size * 7):
        path.write_bytes(whole[: at + size * 7]) if not path.exists() else _append(path, whole, size * 7)
        found += [line["text"] for line in follower.read() if line is not None]
    assert found == texts


def _append(path: Path, whole: bytes, size: int) -> None:
    have = path.stat().st_size
    with path.open("ab") as file:
        file.write(whole[have : have + size])


def test_a_line_longer_than_what_is_read_at_once_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(view_data, "READ_BYTES", 64)
    path = tmp_path / "lines"
    path.write_text('{"a": 1}\n' + json.dumps({"long": "x" * 500}) + "\n" + '{"b": 2}\n')
    assert [line for line in Follower(path).read() if line] == [{"a": 1}, {"b": 2}]


@given(st.text())
def test_visible_text_hides_nothing(text: str) -> None:
    shown = visible(text)
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]", shown)
    shown.encode()
    assert visible(shown) == shown


@given(st.text(max_size=300), st.integers(10, 50))
def test_clipped_text_keeps_both_ends(text: str, limit: int) -> None:
    shown = clip(text, limit)
    assert shown == text if len(text) <= limit else shown.startswith(text[: limit * 2 // 3])
    assert shown.endswith(text[-3:])
    assert len(shown) <= limit + 60


@given(st.lists(st.tuples(NUMBERS, NUMBERS), max_size=20), st.sampled_from(["line", "circle", "diamond"]))
def test_any_numbers_make_a_well_formed_chart(points: list[tuple[float, float]], style: Any) -> None:
    intervals = [(y - 1, y + 1) for _, y in points]
    series = Series("<&>", sorted(points), 1, style, intervals)
    picture = chart(
        [series],
        about='"<x>"',
        x_label="<b>",
        tips=[(x, "<&>") for x, _ in sorted(points)[: len(points) // 2]],
    )
    ElementTree.fromstring(picture)
    assert not re.search(r"nan|inf", picture.replace('class="nothing"', ""))


@given(NUMBERS, st.floats(1e-6, 1e9))
def test_ticks_are_few_and_inside(low: float, span: float) -> None:
    found = ticks(low, low + span)
    assert len(found) <= 12
    assert all(low - span * 0.01 <= tick <= low + span * 1.01 for tick in found)


def test_outcomes_have_a_mark() -> None:
    marks = server._templates("x", has_run=True).get_template("parts.html").module
    assert set(Outcome) <= set(marks.marks)  # type: ignore[attr-defined]
