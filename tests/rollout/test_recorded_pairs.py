"""Pairs for recordings: into the journal once, nothing asked twice, within the budget."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from contextlib import AsyncExitStack
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from hintloop.agent.conversation import Conversation
from hintloop.agent.policy import load_renderer
from hintloop.agent.recorded import tokenise
from hintloop.cli.model import find_model
from hintloop.envs.models import ToolCall
from hintloop.replay.episode import Episode, Outcome
from hintloop.replay.journal import Journal
from hintloop.replay.supplement import is_supplement
from hintloop.rollout.answer_cache import AnswerCache
from hintloop.rollout.config import TeachersConfig, TeacherSpec
from hintloop.rollout.recorded_pairs import Found, History, Replayed, Settled, estimate, replay, room_for
from hintloop.rollout.teaching import answers_folder, open_asking, rule_of

from .recordings import agent, call, episode, recorded, user
from .teacher_server import Reply, TeacherServer, says, says_all, teaching

GOOD = ToolCall(name="shell", arguments={"command": "ls -a"})
OWN = ToolCall(name="shell", arguments={"command": "ls"})


def settings(server: TeacherServer, count: int = 2, **more: Any) -> TeachersConfig:
    usd = more.pop("usd", 0.0)
    specs = tuple(
        TeacherSpec(name=f"t{n}", base_url=server.url, model=f"m{n}", usd_per_mtok_in=0, usd_per_mtok_out=usd)
        for n in range(count)
    )
    return TeachersConfig(
        **{"teachers": specs, "agree": count, "ask": "all", "max_asks_per_episode": 9, "attempts": 1, **more}
    )


def run(
    journal: Journal, folder: Path, chosen: TeachersConfig, history: History | None = None
) -> tuple[Replayed, dict[str, Any]]:
    async def replaying() -> tuple[Replayed, dict[str, Any]]:
        async with AsyncExitStack() as stack:
            asking = await open_asking(chosen, None, folder, stack)
            assert asking is not None
            done = await replay(
                journal,
                asking,
                settled(folder, chosen),
                history=history or History(),
                in_flight=room_for(chosen),
            )
            return done, asking.snapshot()

    return asyncio.run(replaying())


def settled(folder: Path, chosen: TeachersConfig) -> Settled:
    return Settled(folder / "settled.txt", chosen.teachers, chosen.agree)


def journal_of(folder: Path, *episodes: Episode) -> Journal:
    journal = Journal(folder / "journal")
    journal.writer("ingest").append(list(episodes) or [episode()])
    return journal


def supplements(journal: Journal) -> list[Episode]:
    return [each for each in journal.reader().poll() if is_supplement(each)]


def test_what_teachers_agree_on_is_a_new_episode_that_holds_nothing_else(tmp_path: Path) -> None:
    journal = journal_of(tmp_path)
    with teaching(lambda number, body: says(GOOD)) as server:
        done, told = run(journal, tmp_path / "state", settings(server, ask="errors", ask_probability=0.0))
    assert done == Replayed(Found(episodes=1, states=1), supplements=1)
    assert (told["asked_turns"], told["pairs"], told["by_reason"]["error"]["pairs"]) == (1, 1, 1)
    (made,) = supplements(journal)
    assert made.episode_id.startswith("codex/a/main/1+pairs/")
    assert made.group_id == made.episode_id
    assert (made.outcome, made.reward, made.hint_sites) == (Outcome.UNGRADED, None, ())
    assert made.turns == episode().turns[:3]
    (pair,) = made.pairs
    assert (pair.turn, pair.chosen_text, pair.asked, pair.agreed) == (1, 'shell {"command": "ls -a"}', 2, 2)
    assert pair.rejected_text == 'I look\nshell {"command": "lss"}'
    assert pair.teachers == ("t0", "t1")


def test_several_calls_that_teachers_agree_on_are_one_action_with_tokens_in_the_end(tmp_path: Path) -> None:
    journal = journal_of(tmp_path)
    further = ToolCall(name="read_file", arguments={"path": "a.py"})
    with teaching(lambda number, body: says_all(GOOD, further)) as server:
        run(journal, tmp_path / "state", settings(server, ask="errors", ask_probability=0.0))
    (made,) = supplements(journal)
    assert made.pairs[0].chosen_text == 'shell {"command": "ls -a"}\nread.file {"path": "a.py"}'
    chat = load_renderer(find_model("student-tiny"))
    result = tokenise(made, chat)
    assert not result.dropped_pairs
    speaker = Conversation(chat.renderer, [{"role": "user", "content": "x"}])
    recorded_name = further.model_copy(update={"name": "read.file"})
    assert speaker.parse(result.episode.pairs[0].chosen_ids) == [GOOD, recorded_name]


def test_the_same_command_again_asks_nothing_and_writes_nothing(tmp_path: Path) -> None:
    journal = journal_of(tmp_path)
    with teaching(
        lambda number, body: says(OWN)
    ) as server:  # at one of three turns they agree with the agent
        first, told = run(journal, tmp_path / "state", settings(server))
        asked = len(server.requests)
        again, _ = run(journal, tmp_path / "state", settings(server))
        assert len(server.requests) == asked == 6
    assert (first.found.states, told["same"], told["pairs"]) == (3, 1, 2)
    assert (again.found.settled, again.supplements) == (3, 0)
    assert len(supplements(journal)) == 1


def test_a_recording_that_begins_the_same_is_not_asked_about_twice(tmp_path: Path) -> None:
    longer = recorded(*episode().turns, user("more"), agent(), call("shell", {"command": "x"}), name="b")
    journal = journal_of(tmp_path, episode(), longer)
    with teaching(lambda number, body: says(GOOD)) as server:
        done, _ = run(journal, tmp_path / "state", settings(server, 1))
        assert len(server.requests) == 4
    assert (done.found.states, done.found.settled) == (7, 3)


def test_a_teacher_without_an_answer_is_asked_again_and_one_without_a_call_is_not(tmp_path: Path) -> None:
    journal, down = journal_of(tmp_path), True

    def answer(number: int, body: dict[str, Any]) -> Reply:
        if body["model"] == "m0":
            return says(None)
        return Reply(b"", 400) if down else says(GOOD)

    with teaching(answer) as server:
        chosen = settings(server, ask="errors", ask_probability=0.0, agree=1)
        run(journal, tmp_path / "state", chosen)
        down = False
        run(journal, tmp_path / "state", chosen)
        run(journal, tmp_path / "state", chosen)
        assert Counter(body["model"] for body in server.requests) == {"m0": 2, "m1": 2}
    assert len(supplements(journal)) == 1


def test_what_all_have_answered_without_a_pair_is_settled_for_these_teachers(tmp_path: Path) -> None:
    journal = journal_of(tmp_path)
    with teaching(lambda number, body: says(None)) as server:
        chosen = settings(server, 1)
        for _ in range(2):
            done, _ = run(journal, tmp_path / "state", chosen)
        assert len(server.requests) == 3
        run(journal, tmp_path / "state", settings(server, 2))
        assert len(server.requests) == 9
    assert done.found.settled == 3
    path = tmp_path / "state" / "settled.txt"
    path.write_bytes(path.read_bytes() + b"0123")  # cut off by a crash
    settled(tmp_path / "state", chosen).add(["f" * 32])
    assert len(settled(tmp_path / "state", chosen).keys) == 4


def test_no_question_waits_for_a_teachers_limit_until_its_time_is_up() -> None:
    limits = (None, 20.0, 0.1)
    specs = [
        TeacherSpec(name="t", base_url="http://t/v1", model="m", requests_per_minute=limit)
        for limit in limits
    ]
    rooms = [room_for(TeachersConfig(teachers=(spec,), in_flight=16, timeout_s=30.0)) for spec in specs]
    assert rooms == [16, 5, 1]


def test_the_budget_ends_it_and_a_larger_one_goes_on(tmp_path: Path) -> None:
    # The worst case of a question is 2.048 USD, its cost 1.
    journal = journal_of(tmp_path, *(episode(name, f"task {name}") for name in "abc"))
    with teaching(lambda n, body: says(GOOD, {"prompt_tokens": 1, "completion_tokens": 1000})) as server:
        chosen = settings(server, 1, usd=1000.0, in_flight=1, ask="errors", ask_probability=0.0)
        low, told = run(journal, tmp_path / "state", chosen.model_copy(update={"budget_usd": 3.5}))
        assert (low.stopped, told["pairs"], told["over_budget"]) == ("budget", 2, 1)
        high, _ = run(journal, tmp_path / "state", chosen.model_copy(update={"budget_usd": 9.0}))
        assert len(server.requests) == 3
    assert (high.stopped, high.found.settled, high.supplements) == ("end", 2, 1)
    assert sum(pair.cost_usd for made in supplements(journal) for pair in made.pairs) == pytest.approx(3.0)


def test_an_estimate_asks_nothing_and_knows_what_is_there_already(tmp_path: Path) -> None:
    journal = journal_of(tmp_path)
    with teaching(lambda number, body: says(GOOD)) as server:
        chosen = settings(server, 2, usd=1000.0, attempts=3)

        def expected() -> tuple[Found, list[dict[str, Any]]]:
            folder = tmp_path / "state"
            cache = AnswerCache(answers_folder(folder), max_bytes=10**6)
            known = settled(folder, chosen)
            return estimate(
                journal, rule_of(chosen), chosen.teachers, known, cache, attempts=3, history=History()
            )

        found, rows = expected()
        assert not server.requests
        assert not (tmp_path / "state").exists()
        assert found.states == 3
        assert [(row["teacher"], row["questions"], row["usd"]) for row in rows] == [
            ("t0", 3, pytest.approx(6.144)),
            ("t1", 3, pytest.approx(6.144)),
        ]
        assert rows[0]["worst_usd"] == pytest.approx(3 * rows[0]["usd"])
        run(journal, tmp_path / "state", chosen)
        after, rows = expected()
    assert (after.settled, [row["questions"] for row in rows]) == (3, [0, 0])


def test_long_transcripts_are_cut_or_left_out(tmp_path: Path) -> None:
    journal = journal_of(
        tmp_path, recorded(user("u" * 400), agent(), call("shell", {}), agent(), call("shell", {}))
    )
    with teaching(lambda number, body: says(GOOD)) as server:
        done, _ = run(journal, tmp_path / "state", settings(server, 1), History(500, len))
        assert [len(body["messages"]) for body in server.requests] == []
        assert done.found.too_long == 2
        run(journal, tmp_path / "state", settings(server, 1), History(600, len))
        assert sorted(len(body["messages"]) for body in server.requests) == [2]


def test_a_killed_replay_goes_on_and_asks_no_answered_question_again(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    writer = journal.writer("ingest")
    for name in "abcd":
        writer.append([episode(name, f"task {name}")])

    def slow(number: int, body: dict[str, Any]) -> Reply:
        time.sleep(0.1)
        return says(GOOD, {"prompt_tokens": 1, "completion_tokens": 1})

    with teaching(slow) as server:
        chosen = settings(server, 1, usd=1.0, in_flight=1, budget_usd=1.0)
        kills, deadline = 0, time.monotonic() + 60
        for stop_at in (2, 5, 8, None):
            # A fork, as a new interpreter takes seconds to begin.
            child = get_context("fork").Process(target=run, args=(journal, tmp_path / "state", chosen))
            child.start()
            while child.is_alive() and time.monotonic() < deadline:
                if stop_at is not None and len(server.requests) >= stop_at:
                    child.kill()
                    kills += 1
                    break
                time.sleep(0.01)
            child.join(60)
        asked = Counter(json.dumps(body["messages"]) for body in server.requests)
    assert child.exitcode == 0
    assert kills == 3
    assert len(asked) == 12
    assert sum(asked.values()) <= 12 + kills  # what was under way at a kill has no answer
    pairs = [(made.task_id, pair.turn) for made in supplements(journal) for pair in made.pairs]
    assert sorted(pairs) == [(f"codex/{name}", turn) for name in "abcd" for turn in (1, 3, 5)]
    assert run(journal, tmp_path / "state", chosen)[0].found.settled == 12
