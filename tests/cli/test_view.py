"""The pages of a run, over HTTP: right numbers, hostile text kept harmless, and files that are being written."""

from __future__ import annotations

import contextlib
import http.client
import json
import math
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest
import uvicorn

from hintloop.cli.errors import UserError
from hintloop.cli.main import run_command
from hintloop.cli.report import write_report
from hintloop.cli.runfolder import RunFolder
from hintloop.cli.view import episodes as view_episodes
from hintloop.cli.view.conversation import conversation
from hintloop.cli.view.server import Pages, create_app, open_pages
from hintloop.learner.progress import Heartbeat, append_line
from hintloop.replay.episode import Episode, HintSite, PreferencePair, Turn
from hintloop.replay.journal import Journal
from hintloop.rollout import manager
from hintloop.rollout.asking import PairCounts, Reason
from hintloop.rollout.status import Board, write_json

Browse = Callable[[Pages], httpx.Client]
HOSTILE = "</pre></script><script>alert(\"1')</script><img src=x onerror=alert(2)>{{ 7*7 }}\x1b[2J\x00\u202e"


class Parsed(HTMLParser):
    """What a browser would see: elements, the text between them, and pairs of terms and values."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)
        terms = re.findall(r"<dt>([^<]*)</dt><dd>([^<]*)</dd>", page)
        tiles = re.findall(r'label">([^<]*)</span><span class="value">([^<]*)<', page)
        self.facts = dict([*terms, *tiles])

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture(autouse=True)
def _no_listing_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is interrupted for a while would be used again, and a new segment not be on the page."""
    monkeypatch.setattr(view_episodes, "SLOW_LISTING_S", math.inf)


@pytest.fixture
def browse() -> Iterator[Browse]:
    """``browse(pages)`` serves pages on a free loopback port and gives a client for them."""
    with contextlib.ExitStack() as stack:

        def start(pages: Pages) -> httpx.Client:
            sock = socket.create_server(("127.0.0.1", 0))
            stack.callback(sock.close)
            running = uvicorn.Server(
                uvicorn.Config(create_app(pages), ws="none", log_config=None, lifespan="off")
            )
            thread = threading.Thread(target=running.run, kwargs={"sockets": [sock]}, daemon=True)
            thread.start()
            stack.callback(thread.join, 10)
            stack.callback(setattr, running, "should_exit", True)
            url = f"http://127.0.0.1:{sock.getsockname()[1]}"
            return stack.enter_context(httpx.Client(base_url=url, timeout=20))

        yield start


@pytest.fixture
def live(run: RunFolder) -> RunFolder:
    """The synthetic run with what its processes write beside the journal, by the code that writes it."""
    journal, board = Journal(run.journal), Board(state="playing episodes")
    for segment in journal.segments():
        add_group_line(run, journal.read(segment))
    counts = PairCounts(asked_turns=5, answers=4, pairs=3, cost_usd=0.25)
    counts.errors["slow-teacher"] += 1
    counts.value(Reason.CHANCE).questions = 5
    board.lost["engine"] = 2
    board.details |= {
        "version": lambda: 1,
        "waited_s": lambda: 0.0,
        "teachers": counts.snapshot,
    }
    board.details["servers"] = lambda: [
        {"url": "http://engine:1", "version": 1, "in_flight": 3, "state": "out"}
    ]
    write_json(run.path / "status" / "rollout.json", board.snapshot())
    Heartbeat(run.path / "status" / "learner.json").beat("waiting for episodes", step=2, version=2)
    return run


def add_group_line(run: RunFolder, episodes: list[Episode]) -> None:
    first = episodes[0]
    group = manager._Group(first.group_id, first.task_id, 0, time.monotonic())
    append_line(run.metrics("rollout"), manager._line(group, episodes))


def pages_of(run: RunFolder) -> Pages:
    return open_pages(run.path, None)


def an_episode(run: RunFolder, **changes: Any) -> Episode:
    """The first one of the journal, which has a tool error, a hint and a pair; changed."""
    return replace(Journal(run.journal).read("rollout-00000000.parquet")[0], **changes)


def hostile_episode(run: RunFolder) -> Episode:
    turn = Turn(
        "assistant",
        4,
        7,
        HOSTILE,
        tool_name=HOSTILE,
        tool_arguments=json.dumps({HOSTILE: HOSTILE, "number": 3}),
        error_kind=HOSTILE,
        error_message=HOSTILE,
        error_cause=HOSTILE,
    )
    turns = (Turn(HOSTILE, 0, 1, HOSTILE), Turn("user", 1, 2, HOSTILE), turn)
    site = HintSite(2, HOSTILE, HOSTILE, 3, 4, 7, (5,))
    pair = PreferencePair(2, 4, (1,), (2,), HOSTILE, HOSTILE, 1, 1, False, (HOSTILE,))
    call = replace(pair, chosen_text=f"{HOSTILE.replace(' ', '')} {json.dumps({'a': HOSTILE})}")
    return an_episode(
        run,
        episode_id=HOSTILE,
        group_id=HOSTILE,
        task_id=HOSTILE,
        model=HOSTILE,
        source=HOSTILE,
        env=HOSTILE,
        turns=turns,
        reward_parts={HOSTILE: 1.0},
        hint_sites=(site,),
        pairs=(pair, call),
    )


# What the pages say


def test_page_of_a_run_has_the_numbers_of_its_report(live: RunFolder, browse: Browse) -> None:
    summary, _ = write_report(live)
    answer = browse(pages_of(live)).get("/")
    assert answer.status_code == 200
    page = Parsed(answer.text)
    episodes = summary["episodes"]
    assert page.facts["episodes"] == f"{episodes['played']} in {episodes['groups']} groups"
    assert page.facts["Episodes"] == str(episodes["played"])
    for outcome in ("solved", "failed"):
        assert page.facts[outcome] == str(episodes["outcomes"][outcome])
    assert page.facts["turns"] == str(episodes["turns"])
    assert page.facts["sampled tokens"] == str(episodes["sampled_tokens"])
    assert page.facts["weight versions"] == str(summary["weights"]["versions"])
    assert page.facts["staleness at most"] == str(int(summary["staleness"]["max"]))
    assert page.facts["Hint sites"] == str(sum(summary["hint_sites"].values()))
    assert page.facts["Preference pairs"] == str(summary["pairs"])
    assert page.facts["Optimizer steps"] == str(summary["weights"]["steps"])
    for kind, count in summary["tool_errors"].items():
        assert re.search(rf"{kind}</code></td><td>model</td><td class=\"n\">{count}<", answer.text)
    for row in summary["held_out"]:
        assert f"{100 * row['before']['rate']:.1f} %" in page.text
    assert f"{summary['held_out'][0]['gain_points']:+.1f}" in page.text


def test_page_of_a_run_says_who_does_what_and_what_teachers_cost(live: RunFolder, browse: Browse) -> None:
    page = Parsed(browse(pages_of(live)).get("/").text)
    assert "playing episodes" in page.text
    assert "waiting for episodes" in page.text
    assert "The rollout side sets the pace" in page.text
    assert "http://engine:1" in page.text
    assert page.facts["spent"] == page.facts["Teachers cost"] == "$0.25"
    assert page.facts["failed answers of: slow-teacher"] == "1"
    assert "Why turns were asked about" in page.text
    assert page.facts["lost to the infrastructure"] == "engine: 2"
    assert "live" in page.text


def test_an_episode_is_a_conversation_with_its_hint_before_the_turn(live: RunFolder, browse: Browse) -> None:
    client = browse(pages_of(live))
    links = re.findall(r'"(/episode/[^"]+)"', client.get("/episodes").text)
    assert len(links) == 4
    text = Parsed(client.get("/episode/rollout-00000000.parquet/0").text).text
    assert "Attempts of group g0" in text
    text = text[text.index("Fix solution.py") :]
    marks = ["Hint before turn 2", "files are solution.py", "read_file", "nowhere.py"]
    marks += [
        "tool error file_not_found",
        "rejected",
        "chosen: what expert would do",
        "no such file",
        "submit",
    ]
    places = [text.index(mark) for mark in marks]
    assert places == sorted(places)
    assert "reward 0" in text


def test_a_pair_shows_all_calls_of_both_sides(live: RunFolder) -> None:
    episode = an_episode(live)
    pair = replace(episode.pairs[0], chosen_text='look {"path": "a.py"}\nsubmit {}', rejected_text="one\ntwo")
    at = pair.turn
    turns = (*episode.turns[: at + 2], *episode.turns[at + 1 :])  # a second result, as of a second call
    for made, rejected in ((episode.turns, None), (turns, "one\ntwo")):
        shown = conversation(replace(episode, turns=made, pairs=(pair,)), (), here=0)["messages"]
        (choice,) = shown[at].pairs
        assert (choice.chosen.call, choice.chosen.text) == (None, pair.chosen_text)
        assert (choice.rejected.call is None) == (rejected is not None)
        assert rejected in (None, choice.rejected.text)


def test_kept_examples_can_be_opened(
    live: RunFolder, browse: Browse, keep_example: Callable[..., None]
) -> None:
    keep_example("after", 2, 0, solved=True)
    client = browse(pages_of(live))
    assert "/example/after-v2-heldmut-t1-0.json" in client.get("/").text
    assert "tool error file_not_found" in Parsed(client.get("/example/after-v2-heldmut-t1-0.json").text).text


def test_pages_need_nothing_from_elsewhere(live: RunFolder, browse: Browse) -> None:
    client = browse(pages_of(live))
    for path in ("/", "/episodes", "/episode/rollout-00000000.parquet/0"):
        answer = client.get(path)
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        page = Parsed(answer.text)
        links = [
            value or ""
            for _, attributes in page.tags
            for name, value in attributes.items()
            if name in ("src", "href")
        ]
        assert links
        assert all(link.startswith(("/", "#", "?")) and not link.startswith("//") for link in links)
        assert not any("style" in attributes or tag == "style" for tag, attributes in page.tags)
        for link in links:
            assert client.get(link.partition("#")[0] or path).status_code == 200
    assert "http" not in client.get("/static/style.css").text


# Hostile text


def test_hostile_text_is_shown_and_never_run(live: RunFolder, browse: Browse) -> None:
    episode = hostile_episode(live)
    name = Journal(live.journal).writer("hostile").append([episode])
    client = browse(pages_of(live))
    for path in (
        f"/episode/{name}/0",
        "/episodes",
        f"/episodes?find={quote(HOSTILE)}&outcome={quote(HOSTILE)}",
    ):
        answer = client.get(path)
        assert answer.status_code == 200
        page = Parsed(answer.text)
        assert "script" not in [tag for tag, _ in page.tags]
        assert not any(key.startswith("on") for _, attributes in page.tags for key in attributes)
        assert {tag for tag, _ in page.tags}.isdisjoint({"iframe", "object", "embed"})
        assert 'alert("1' in page.text or "alert" in str(page.tags)
        assert not set("\x1b\x00\u202e") & set(answer.text)
    assert "49" not in Parsed(client.get(f"/episode/{name}/0").text).text.replace("{{ 7*7 }}", "")


# Addresses that are not there


@pytest.mark.parametrize(
    "path",
    [
        "/episode/rollout-00000000.parquet/99",
        "/episode/rollout-00000099.parquet/0",
        "/episode/rollout-00000000.parquet/0?turn=9",
        "/episode/rollout-00000000.parquet/0?turn=x",
        "/episode/..%2f..%2fconfig.toml/0",
        "/episode/../../config.toml/0",
        "/episode/%2fetc%2fpasswd/0",
        "/example/..%2fconfig.toml",
        "/example/config.toml",
        "/static/../server.py",
        "/static/..%2f..%2fserver.py",
        "/static//etc/passwd",
        "/episodes?before=..%2fx~0",
        "/episodes?before=rollout-00000099.parquet~1",
        "/config.toml",
    ],
)
def test_what_is_not_there_is_404_with_one_line(live: RunFolder, browse: Browse, path: str) -> None:
    client = browse(pages_of(live))
    connection = http.client.HTTPConnection("127.0.0.1", client.base_url.port, timeout=10)
    connection.request("GET", path)  # as it stands: other clients would tidy it up
    answer = connection.getresponse()
    body = answer.read().decode()
    connection.close()
    assert answer.status == 404
    assert body.count("\n") == 1
    assert body.endswith("\n")
    assert "student" not in body


def test_pages_of_other_hosts_are_refused(live: RunFolder, browse: Browse) -> None:
    client = browse(pages_of(live))
    assert client.get("/", headers={"origin": "http://evil.example"}).status_code == 403
    assert client.get("/", headers={"host": "evil.example"}).status_code == 403
    assert client.get("/", headers={"origin": "null"}).status_code == 403
    assert client.get("/", headers={"host": "localhost:1"}).status_code == 200
    assert client.get("/", headers={"origin": "http://localhost:8010"}).status_code == 200
    assert client.post("/").status_code == 405


# Files that are being written


def test_half_a_line_is_left_for_later(live: RunFolder, browse: Browse) -> None:
    client = browse(pages_of(live))
    path = live.metrics("rollout")
    line = path.read_text().splitlines()[0]
    with path.open("a") as file:
        file.write(line[:40])
    assert Parsed(client.get("/").text).facts["Episodes"] == "4"
    with path.open("a") as file:
        file.write(line[40:] + "\n")
    assert Parsed(client.get("/").text).facts["Episodes"] == "6"


def test_a_file_that_is_cut_back_is_counted_anew(live: RunFolder, browse: Browse) -> None:
    from hintloop.learner.progress import cut_lines

    client = browse(pages_of(live))
    assert Parsed(client.get("/").text).facts["Optimizer steps"] == "2"
    cut_lines(live.metrics("learner"), 1)
    assert Parsed(client.get("/").text).facts["Optimizer steps"] == "1"


def test_new_and_damaged_segments_are_listed_for_what_they_are(live: RunFolder, browse: Browse) -> None:
    client = browse(pages_of(live))
    assert "g2-0" not in client.get("/episodes").text
    name = Journal(live.journal).writer("rollout").append([an_episode(live, episode_id="g2-0")])
    assert "g2-0" in client.get("/").text
    path = live.journal / name
    damaged = live.journal / "rollout-00000003.parquet"
    damaged.write_bytes(path.read_bytes()[:-50])
    page = client.get("/episodes").text
    assert "left out: rollout-00000003.parquet" in page
    assert "g2-0" in page
    answer = client.get("/episode/rollout-00000003.parquet/0")
    assert (answer.status_code, answer.text.count("\n")) == (404, 1)


@pytest.mark.parametrize(
    "junk", ['{"step": "x", "time": []}', "[1]", "nonsense", '{"time": 1e400, "errors": 3}', ""]
)
def test_junk_in_any_file_breaks_no_page(live: RunFolder, browse: Browse, junk: str) -> None:
    for path in (live.metrics("rollout"), live.metrics("learner"), live.evaluation, live.plays):
        with path.open("a") as file:
            file.write(junk + "\n")
    for part in ("rollout", "learner"):
        (live.path / "status" / f"{part}.json").write_text(junk)
    live.config.write_text("run = 3\n" if junk else "= broken")
    answer = browse(pages_of(live)).get("/")
    assert answer.status_code == 200
    assert Parsed(answer.text).facts["Episodes"] == "4"


def test_strange_values_in_a_status_break_no_page(live: RunFolder, browse: Browse) -> None:
    strange: dict[str, Any] = {
        "state": {"a": 1},
        "since": "x",
        "updated": None,
        "servers": [1, {}],
        "teachers": [],
        "lost": {"a": []},
    }
    for part in ("rollout", "learner"):
        (live.path / "status" / f"{part}.json").write_text(json.dumps(strange))
    assert browse(pages_of(live)).get("/").status_code == 200


# Other folders


def test_a_run_that_has_just_begun_has_a_page(empty_run: RunFolder, browse: Browse) -> None:
    client = browse(pages_of(empty_run))
    page = Parsed(client.get("/").text)
    assert "not started" in page.text
    assert page.facts["Episodes"] == "\u2013"
    assert client.get("/episodes").status_code == 200


def test_a_folder_of_the_learner_alone_shows_what_it_has(
    live: RunFolder, browse: Browse, tmp_path: Path
) -> None:
    alone = tmp_path / "learn"
    (alone / "metrics").mkdir(parents=True)
    line = {
        "step": 1,
        "version": 1,
        "time": 5.0,
        "solved": 0.5,
        "reward_mean": 0.4,
        "loss_sdpo": 0.1,
        "sites": 7,
    }
    append_line(alone / "metrics" / "learner.jsonl", line)
    page = Parsed(browse(open_pages(alone, str(live.journal))).get("/").text)
    assert page.facts["Success now"] == "50 %"
    assert page.facts["sites"] == "7"
    assert "g1-1" in page.text


def test_a_journal_alone_shows_its_episodes(live: RunFolder, browse: Browse) -> None:
    client = browse(open_pages(None, str(live.journal)))
    assert "g1-1" in client.get("/").text
    assert client.get("/episode/rollout-00000000.parquet/0").status_code == 200
    assert client.get("/example/x").status_code == 404


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not the folder of a run"):
        open_pages(tmp_path, None)
    with pytest.raises(UserError, match="give a RUN"):
        open_pages(None, None)


# The command


def test_the_command_serves_until_it_is_told_to_stop(live: RunFolder, tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    command = [sys.executable, "-m", "hintloop.cli.main", "view", str(live.path), "--port", "0"]
    process = subprocess.Popen([*command, "--ready-file", str(ready)], stdout=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 60
        while not ready.exists() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        url = ready.read_text().strip()
        assert httpx.get(f"{url}/health", timeout=20).text == "ok\n"
        assert httpx.get(url, timeout=20).status_code == 200
        process.send_signal(signal.SIGTERM)
        printed, _ = process.communicate(timeout=20)
        assert printed == url + "\n"
        assert process.returncode == 0
        assert not ready.exists()
    finally:
        process.kill()
        process.wait(10)


def test_a_port_that_is_taken_is_one_line(live: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert run_command(["view", str(live.path), "--port", str(port)]) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("hintloop: error: Address already in use")
    assert printed.out == ""
