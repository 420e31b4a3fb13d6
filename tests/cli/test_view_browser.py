"""The pages in a real browser: they keep up with a run, read well at any width, and run nothing of an episode.

Playwright drives the system's Chromium (``apt install chromium``); it needs no browsers of its own.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hintloop.cli.runfolder import RunFolder
from hintloop.replay.journal import Journal

pytestmark = [pytest.mark.browser, pytest.mark.slow]
HOSTILE = "<script>document.title = 'run'</script><img src=x onerror=\"document.title = 'run'\">"
GROUP = {"time": 1e6, "episodes": 2, "solved": 1, "reward_mean": 0.5, "errors": {"timeout": 1}, "pairs": 3}


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=shutil.which("chromium"), timeout=180_000)
        yield browser
        browser.close()


@pytest.fixture
def url(run: RunFolder, tmp_path: Path) -> Iterator[str]:
    """The address of the synthetic run."""
    add_group(run)
    ready = tmp_path / "ready"
    command = [sys.executable, "-m", "hintloop.cli.main", "view", str(run.path), "--port", "0"]
    process = subprocess.Popen([*command, "--ready-file", str(ready)], stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not ready.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    try:
        yield ready.read_text().strip()
    finally:
        process.kill()
        process.wait(10)


@pytest.fixture
def page(chromium: Any, url: str) -> Iterator[Any]:
    """A page that fails the test when the browser complains, or asks anybody but us."""
    context = chromium.new_context(viewport={"width": 1280, "height": 900}, base_url=url)
    context.set_default_timeout(120_000)
    opened, complaints, asked = context.new_page(), [], []
    opened.on("console", lambda message: complaints.append(message.text))
    opened.on("pageerror", lambda error: complaints.append(str(error)))
    opened.on("request", lambda request: asked.append(request.url))
    yield opened
    context.close()
    assert complaints == []
    assert asked
    assert all(each.startswith(url) for each in asked)


def add_group(run: RunFolder) -> None:
    path = run.metrics("rollout")
    path.parent.mkdir(exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(GROUP) + "\n")


def test_the_page_of_a_run_keeps_up_and_stays_where_it_is(run: RunFolder, page: Any) -> None:
    page.goto("/")
    tile = "//span[text()='Preference pairs']/following-sibling::span[1]"
    assert page.text_content(tile) == "3"
    page.evaluate("window.scrollTo(0, 400); window.same = true")
    add_group(run)
    page.wait_for_selector(f"{tile}[text()='6']")
    assert page.evaluate("window.same") is True
    assert page.evaluate("window.scrollY") == 400


@pytest.mark.parametrize("width", [390, 768, 1280])
@pytest.mark.parametrize("path", ["/", "/episodes", "/episode/rollout-00000000.parquet/0"])
def test_nothing_is_wider_than_the_window(page: Any, path: str, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 900})
    page.goto(path)
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_hint_stands_above_its_turn_and_a_pair_side_by_side(page: Any) -> None:
    page.goto("/episode/rollout-00000000.parquet/0")
    hint, turn, rejected, chosen = (
        page.locator(each).first.bounding_box() for each in (".hint", ".turn.wrong", ".rejected", ".chosen")
    )
    assert hint["y"] + hint["height"] <= turn["y"]
    assert turn["y"] < rejected["y"] == chosen["y"] < turn["y"] + turn["height"]
    page.set_viewport_size({"width": 390, "height": 900})
    assert (
        page.locator(".rejected").first.bounding_box()["y"]
        < page.locator(".chosen").first.bounding_box()["y"]
    )


def test_dark_and_light_follow_the_browser(page: Any) -> None:
    colours = []
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        page.goto("/")
        colours.append(page.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert colours[0] != colours[1]


def test_nothing_of_an_episode_runs(run: RunFolder, page: Any) -> None:
    journal = Journal(run.journal)
    episode = journal.read("rollout-00000000.parquet")[0]
    turns = [replace(turn, text=HOSTILE, error_message=HOSTILE, tool_name=HOSTILE) for turn in episode.turns]
    hostile = replace(episode, episode_id=HOSTILE, task_id=HOSTILE, turns=tuple(turns))
    name = journal.writer("hostile").append([hostile])
    for path in ("/", "/episodes", f"/episode/{name}/0"):
        page.goto(path)
        page.wait_for_timeout(200)
        assert page.title() != "run"
        assert HOSTILE.split()[0] in page.text_content("main")
