"""Hints by a teacher: the episode never waits for them, and the template's text stays where none comes."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from hintloop.agent.engine import Sampling
from hintloop.agent.episode import EpisodeSpec
from hintloop.replay.episode import Episode
from hintloop.rollout.config import TeachersConfig, TeacherSpec
from hintloop.rollout.episodes import play_in
from hintloop.rollout.hint_writer import MAX_HINT_CHARS
from hintloop.rollout.teaching import Asking, open_asking

from .teacher_server import HANG, Reply, teaching

TEMPLATE = "Hint: there is no nowhere.py; files are solution.py"


def writes(text: Any) -> Reply:
    usage = {"prompt_tokens": 10, "completion_tokens": 5}
    return Reply(json.dumps({"choices": [{"message": {"content": text}}], "usage": usage}).encode())


@pytest.fixture
def play(
    make_player: Any, world: Any, tmp_path: Path
) -> Callable[..., tuple[Episode, dict[str, Any], list[Any]]]:
    """Play an episode with one error, or the same again, with a writer that answers ``reply``."""

    def play(
        reply: Reply, *, times: int = 1, episode_id: str = "e0", **settings: Any
    ) -> tuple[Episode, dict[str, Any], list[Any]]:
        async def run(url: str) -> tuple[Episode, dict[str, Any]]:
            spec = TeacherSpec(
                name="writer", base_url=url, model="m", usd_per_mtok_in=0, usd_per_mtok_out=1.0
            )
            chosen = TeachersConfig(
                teachers=(spec,), ask_probability=0.0, attempts=1, **({"deadline_s": 30.0} | settings)
            )
            async with AsyncExitStack() as stack:
                asking = await open_asking(chosen, "writer", tmp_path, stack)
                assert isinstance(asking, Asking)
                watch = asking.watch(episode_id, "system")
                spec_ = EpisodeSpec("e0", "g0", "bugfix/x")
                played = await play_in(world().session, make_player(), spec_, Sampling(1.0, 400), watch)
                return await watch.finish(played.episode), asking.snapshot()

        with teaching(lambda number, body: reply) as server:
            episode, told = [asyncio.run(run(server.url)) for _ in range(times)][-1]
            return episode, told, [body for body in server.requests if "tools" not in body]

    return play


def test_a_hint_that_comes_in_time_takes_the_place_of_the_templates(play: Any, chat: Any) -> None:
    episode, told, (asked,) = play(writes("  look at\nsolution.py first "))
    (site,) = episode.hint_sites
    assert site.hint == "Hint: look at solution.py first"
    assert site.hint in chat.tokenizer.decode(list(site.hint_ids))
    assert site.start == episode.turns[site.turn].start
    assert told["hint_writer"]["written"] == 1
    assert told["hint_writer"]["cost_usd"] == pytest.approx(5e-6)
    assert told["ledger"]["spent_usd"] == pytest.approx(1e-5)  # one question for a pair, one for the hint
    shown = asked["messages"][1]["content"]
    assert "Fix solution.py" in shown
    assert "nowhere.py" in shown
    assert "no such file" in shown


@pytest.mark.parametrize(
    "reply", [writes(""), writes(None), writes(["x"]), writes("\ud800"), Reply(b"", 400)]
)
def test_what_is_no_hint_leaves_the_templates(play: Any, reply: Reply) -> None:
    episode, told, _ = play(reply)
    assert [site.hint for site in episode.hint_sites] == [TEMPLATE]
    assert (told["hint_writer"]["failed"], told["hint_writer"]["written"]) == (1, 0)


def test_a_special_token_in_a_hint_is_plain_text(play: Any, chat: Any) -> None:
    episode, _, _ = play(writes("stop<|im_end|> and <think>"))
    (site,) = episode.hint_sites
    assert site.hint == "Hint: stop< |im_end|> and < think>"
    assert site.hint_ids.count(chat.renderer.get_stop_token_ids()[0]) == 1


def test_a_writer_that_never_answers_keeps_no_episode_beyond_the_deadline(play: Any) -> None:
    started = time.monotonic()
    episode, told, _ = play(HANG, deadline_s=0.2)
    assert [site.hint for site in episode.hint_sites] == [TEMPLATE]
    assert told["hint_writer"]["late"] == 1
    assert time.monotonic() - started < 25


def test_a_hint_that_was_written_once_is_not_asked_for_again(play: Any) -> None:
    episode, told, asked = play(writes("look"), times=2)
    assert len(asked) == 1
    assert [site.hint for site in episode.hint_sites] == ["Hint: look"]
    assert (told["hint_writer"]["written"], told["hint_writer"]["cost_usd"]) == (1, 0)


def test_a_try_after_a_lost_one_has_no_cap_of_its_own(play: Any) -> None:
    # The worst case of a question is 0.002048 USD; a failed answer is booked with that.
    settings = {"episode_budget_usd": 0.005, "cache_mb": 0}
    for episode_id, spent in (("g0-0", 0.004096), ("g0-0.1", 0.004096), ("g0-1", 0.008192)):
        _, told, _ = play(Reply(b"", 500), episode_id=episode_id, **settings)
        assert told["ledger"]["spent_usd"] == pytest.approx(spent)


def test_a_hint_is_short(play: Any) -> None:
    episode, _, _ = play(writes("Hint: " + "x" * 5000))
    assert episode.hint_sites[0].hint == "Hint: " + "x" * MAX_HINT_CHARS


def test_a_writer_that_is_no_teacher_is_refused(tmp_path: Path) -> None:
    async def run() -> None:
        async with AsyncExitStack() as stack:
            await open_asking(TeachersConfig(), "nobody", tmp_path, stack)

    with pytest.raises(ValueError, match="hint_writer is 'nobody'; the teachers are none"):
        asyncio.run(run())
