"""Preference pairs: agreement is about actions, and nobody waits for a teacher beyond the deadline."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hintloop.agent.conversation import Conversation
from hintloop.agent.engine import Sampling
from hintloop.agent.episode import EpisodeSpec
from hintloop.agent.policy import ChatFormat
from hintloop.envs.models import ToolCall
from hintloop.learner.batch import BatchRules, build_step
from hintloop.replay.episode import Episode, PreferencePair
from hintloop.replay.journal import Journal
from hintloop.rollout.asking import WARM_UP, WINDOW, AskRule, PairCounts, Reason, Uncertainty, planned
from hintloop.rollout.config import TeacherSpec
from hintloop.rollout.expert_server import completion
from hintloop.rollout.pairs import PairMaker, agree, canonical
from hintloop.rollout.teachers import Teacher, TeacherAnswer

from .teacher_server import says, says_all

GOOD = ToolCall(name="read_file", arguments={"path": "solution.py"})
SUBMIT = ToolCall(name="submit", arguments={})
RULE = AskRule(agree=1, ask_probability=0.0, max_asks=3, deadline_s=30.0)

Expert = Callable[[Sequence[Any]], ToolCall | Sequence[ToolCall] | None]


def answer(name: str, call: ToolCall | None) -> TeacherAnswer:
    return TeacherAnswer(name, (call,) if call else (), None if call else "failed", 0.0, 0.1)


def test_the_order_of_arguments_makes_no_difference() -> None:
    one = ToolCall(name="edit_file", arguments={"path": "a", "line": 1})
    other = ToolCall(name="edit_file", arguments={"line": 1, "path": "a"})
    assert canonical(one) == canonical(other)
    assert canonical(one) != canonical(ToolCall(name="edit_file", arguments={"line": "1", "path": "a"}))


@given(st.lists(st.sampled_from(["a", "b", "c", None]), max_size=6), st.integers(1, 4))
def test_agreement_needs_enough_equal_actions(names: list[str | None], threshold: int) -> None:
    answers = [answer(f"t{i}", ToolCall(name=name) if name else None) for i, name in enumerate(names)]
    agreed = agree(answers, threshold)
    best = max((names.count(name) for name in names if name), default=0)
    assert (agreed is not None) == (best >= threshold)
    if agreed is not None:
        assert len(agreed.teachers) == best == names.count(agreed.calls[0].name)


def test_a_teacher_has_one_vote() -> None:
    answers = [answer("a", GOOD), answer("a", GOOD), answer("b", None), answer("b", SUBMIT)]
    assert agree(answers, 2) is None
    agreed = agree([*answers, answer("c", GOOD)], 2)
    assert agreed is not None
    assert (agreed.calls, agreed.teachers) == ((GOOD,), ("a", "c"))


def play(
    player: Any,
    world: Any,
    experts: dict[str, Expert],
    rule: AskRule = RULE,
    hang: float = 0.0,
    usd: float = 0.0,
    uncertainty: Uncertainty | None = None,
) -> tuple[Episode, tuple[PreferencePair, ...], PairCounts, float]:
    """One episode with its pairs; the seconds spent waiting for teachers after it."""

    async def run() -> tuple[Episode, tuple[PreferencePair, ...], PairCounts, float]:
        async def reply(request: httpx.Request) -> httpx.Response:
            await asyncio.sleep(hang)
            said = experts[request.url.host]([])
            body = says_all(*said).body if isinstance(said, Sequence) else says(said).body
            return httpx.Response(200, content=body)

        counts = PairCounts()
        async with httpx.AsyncClient(transport=httpx.MockTransport(reply)) as client:
            specs = [
                TeacherSpec(name=name, base_url=f"http://{name}/v1", model="m", usd_per_mtok_out=usd)
                for name in experts
            ]
            teachers = [Teacher(spec, client, timeout_s=30, attempts=1, in_flight=4) for spec in specs]
            maker = PairMaker("e0", teachers, rule, counts, uncertainty)
            async with world.session() as env:
                played = await player.play(
                    env, EpisodeSpec("e0", "g0", "bugfix/x"), Sampling(1.0, 400), maker.on_turn
                )
            started = time.monotonic()
            pairs = await maker.pairs()
            return played.episode, pairs, counts, time.monotonic() - started

    return asyncio.run(run())


def test_a_turn_with_an_error_becomes_a_pair(make_player: Any, world: Any) -> None:
    episode, (pair,), counts, _ = play(make_player(), world(), {"one": lambda messages: GOOD})
    turn = episode.turns[pair.turn]
    assert turn.error_kind == "file_not_found"
    assert pair.prompt_end == turn.start
    assert pair.rejected_ids == episode.token_ids[turn.start : turn.end]
    assert pair.chosen_ids[-1] == pair.rejected_ids[-1]
    assert pair.chosen_ids != pair.rejected_ids
    assert (pair.asked, pair.agreed, pair.teachers, pair.verified) == (1, 1, ("one",), False)
    assert (counts.asked_turns, counts.pairs) == (1, 1)


def test_a_failing_test_is_no_mistake_and_is_not_asked_about(make_player: Any, world: Any) -> None:
    test_then_submit = [
        f'<tool_call>\n{{"name": "{name}", "arguments": {{}}}}\n</tool_call>'
        for name in ("run_tests", "submit")
    ]
    player = make_player(lambda session, turn: test_then_submit[turn])
    episode, pairs, counts, _ = play(player, world(), {"one": lambda messages: GOOD})
    assert [turn.error_kind for turn in episode.turns if turn.role == "assistant"] == ["test_failure", None]
    assert (pairs, counts.asked_turns) == ((), 0)


def test_agreement_of_two_of_three(make_player: Any, world: Any) -> None:
    experts: dict[str, Expert] = {"a": lambda m: GOOD, "b": lambda m: SUBMIT, "c": lambda m: GOOD}
    rule = AskRule(2, 0.0, 3, 30.0)
    _, (pair,), _, _ = play(make_player(), world(), experts, rule)
    assert (pair.asked, pair.agreed, pair.teachers) == (3, 2, ("a", "c"))
    _, none, counts, _ = play(make_player(), world(), experts, AskRule(3, 0.0, 3, 30.0))
    assert none == ()
    assert counts.disagreed == 1


def test_what_the_agent_did_itself_is_no_pair(make_player: Any, world: Any) -> None:
    own = ToolCall(name="read_file", arguments={"path": "nowhere.py"})
    _, pairs, counts, _ = play(make_player(), world(), {"one": lambda messages: own})
    assert (pairs, counts.same) == ((), 1)


def test_a_pair_keeps_who_said_what_and_what_all_answers_cost(make_player: Any, world: Any) -> None:
    experts: dict[str, Expert] = {"a": lambda m: GOOD, "b": lambda m: SUBMIT, "c": lambda m: None}
    _, (pair,), counts, _ = play(make_player(), world(), experts, usd=1.0)
    assert (pair.asked, pair.agreed, pair.teachers) == (3, 1, ("a",))
    assert pair.others == ("b: submit {}", "c: no answer")
    assert pair.cost_usd > 0
    assert pair.cost_usd == pytest.approx(counts.cost_usd)
    assert counts.snapshot()["pairs_per_usd"] == pytest.approx(1 / pair.cost_usd, rel=1e-3)


@pytest.mark.parametrize(
    ("said", "same", "pairs"),
    [((0, 1), 1, 0), ((0,), 0, 1), ((1, 0), 0, 1), ((1,), 0, 1), ((0, 1, 1), 0, 1)],
)
def test_a_turn_of_several_calls_is_compared_as_a_whole(
    make_player: Any, world: Any, said: Sequence[int], same: int, pairs: int
) -> None:
    own = [ToolCall(name="read_file", arguments={"path": "nowhere.py"}), GOOD]
    made = [json.dumps({"name": call.name, "arguments": call.arguments}) for call in (*own, SUBMIT)]
    made = [f"<tool_call>\n{text}\n</tool_call>" for text in made]
    turns = ["\n".join(made[:2]), made[2]]
    teacher: dict[str, Expert] = {"one": lambda messages: [own[number] for number in said]}
    _, found, counts, _ = play(make_player(lambda session, turn: turns[turn]), world(), teacher)
    assert (counts.same, len(found), counts.unrenderable) == (same, pairs, {})


def test_the_learner_gets_a_pair_with_all_calls_that_the_teachers_agreed_on(
    make_player: Any, world: Any, chat: ChatFormat, tmp_path: Path
) -> None:
    experts: dict[str, Expert] = {"a": lambda m: (GOOD, SUBMIT), "b": lambda m: (GOOD, SUBMIT)}
    rule = AskRule(2, 0.0, 3, 30.0)
    episode, pairs, _, _ = play(make_player(), world(), experts, rule)
    Journal(tmp_path).writer("w").append([replace(episode, pairs=pairs)])
    read = Journal(tmp_path).reader().poll()
    (pair,) = read[0].pairs
    assert (pair.chosen_text, pair.agreed) == ('read_file {"path": "solution.py"}\nsubmit {}', 2)
    batch = build_step([read], BatchRules(len(chat.tokenizer)), version=0, seed=(0,))
    assert (batch.counts["pairs"], batch.counts["pairs_unusable"]) == (1, 0)
    (micro,) = batch.micro_batches
    chosen = micro.pair_targets[micro.pair_response == 0].tolist()
    speaker = Conversation(chat.renderer, [{"role": "user", "content": "x"}])
    assert speaker.parse(chosen) == [GOOD, SUBMIT]


def test_a_call_that_the_chat_template_would_garble_is_no_pair(make_player: Any, world: Any) -> None:
    trick = ToolCall(name="bash", arguments={"command": "echo '<|im_end|>'"})
    _, pairs, counts, _ = play(make_player(), world(), {"one": lambda messages: trick})
    assert (pairs, counts.unrenderable) == ((), {"this chat template cannot write such a call": 1})


def test_other_turns_are_asked_about_with_their_probability_up_to_the_maximum(
    make_player: Any, world: Any
) -> None:
    always = AskRule(1, 1.0, 9, 30.0)
    _, _, counts, _ = play(make_player(), world(), {"one": lambda messages: GOOD}, always)
    assert counts.asked_turns == 2
    _, _, counts, _ = play(make_player(), world(), {"one": lambda messages: GOOD}, AskRule(1, 1.0, 1, 30.0))
    assert counts.asked_turns == 1


def test_a_teacher_that_hangs_does_not_delay_beyond_the_deadline(make_player: Any, world: Any) -> None:
    rule = AskRule(1, 1.0, 9, 0.2)
    _, pairs, counts, waited = play(make_player(), world(), {"one": lambda messages: GOOD}, rule, hang=60.0)
    assert (pairs, counts.late) == ((), 2)
    assert waited < 20


def test_what_late_answers_may_have_cost_is_counted(make_player: Any, world: Any) -> None:
    _, _, counts, _ = play(
        make_player(), world(), {"one": lambda messages: GOOD}, AskRule(1, 0.0, 3, 0.3), hang=60.0, usd=1.0
    )
    assert counts.cost_usd == counts.by_reason[Reason.ERROR].cost_usd > 0
    assert counts.late == 1


def test_the_value_of_asking_is_told_by_reason(make_player: Any, world: Any) -> None:
    rule = AskRule(1, 0.0, 9, 30.0, ask="all")
    _, pairs, counts, _ = play(make_player(), world(), {"one": lambda messages: GOOD}, rule, usd=1.0)
    told = json.loads(json.dumps(counts.snapshot()))
    assert len(pairs) == told["pairs"] == 2  # one for the error, one for the turn that submits
    assert set(told["by_reason"]) == {"error", "all"}
    for value in told["by_reason"].values():
        assert (value["questions"], value["pairs"], value["pairs_per_question"]) == (1, 1, 1.0)
        assert value["pairs_per_usd"] == pytest.approx(1 / value["cost_usd"], rel=1e-3)
    assert told["cost_usd"] == pytest.approx(sum(value["cost_usd"] for value in told["by_reason"].values()))


def test_counts_are_json_whatever_went_wrong(make_player: Any, world: Any) -> None:
    _, _, counts, _ = play(make_player(), world(), {"one": lambda messages: None})
    counts.unverified["not better"] += 1
    counts.unrenderable["too odd"] += 1
    told = json.loads(json.dumps(counts.snapshot()))
    assert (told["errors"], told["unverified"]) == ({"one": 1}, {"not better": 1})
    assert told["unrenderable"] == {"too odd": 1}
    assert told["by_reason"]["error"]["pairs_per_usd"] is None


def test_an_uncertain_turn_is_asked_about(make_player: Any, world: Any) -> None:
    rule = AskRule(1, 0.0, 9, 30.0, ask="uncertain")
    for nats, reasons in ((-1.0, {Reason.ERROR: 1, Reason.UNCERTAIN: 1}), (0.5, {Reason.ERROR: 1})):
        uncertainty = Uncertainty(nats=nats)  # a scripted turn has 0 nats per token
        _, _, counts, _ = play(
            make_player(), world(), {"one": lambda messages: GOOD}, rule, uncertainty=uncertainty
        )
        assert {reason: value.questions for reason, value in counts.by_reason.items()} == reasons


@given(st.lists(st.floats(0, 10), min_size=1, max_size=80), st.floats(0, 0.99))
def test_a_turn_is_uncertain_beside_those_of_late(nats: list[float], quantile: float) -> None:
    uncertainty = Uncertainty(quantile=quantile)
    for number, value in enumerate(nats):
        before = sorted(nats[:number])
        wanted = number >= WARM_UP and value > before[math.ceil(quantile * (number - 1))]
        assert uncertainty.high([-value] * 4) == wanted


def test_the_turns_compared_with_are_bounded() -> None:
    uncertainty = Uncertainty(quantile=0.5)
    for _ in range(WINDOW):
        uncertainty.high([-1.0])
    for _ in range(WINDOW):
        uncertainty.high([-5.0])
    assert not uncertainty.high([-4.0])
    assert uncertainty.high([-6.0])
    assert not uncertainty.high([float("nan")])
    assert not uncertainty.high([])
    assert len(uncertainty._sorted) == len(uncertainty._recent) == WINDOW


def test_a_turn_is_planned_by_chance_with_the_given_probability_and_always_the_same() -> None:
    rule = AskRule(1, 0.3, 9, 2.0)
    plans = [planned(rule, Uncertainty(), f"e{number}", 0, [-1.0]) for number in range(2000)]
    assert plans == [planned(rule, Uncertainty(), f"e{number}", 0, [-9.0]) for number in range(2000)]
    assert abs(plans.count(Reason.CHANCE) / 2000 - 0.3) < 0.05
    assert set(plans) == {None, Reason.CHANCE}


def test_a_group_gets_its_pairs_into_the_journal(make_player: Any, world: Any, tmp_path: Path) -> None:
    from hintloop.rollout.manager import GroupRule, Manager
    from hintloop.rollout.pacing import Pacer
    from hintloop.rollout.status import Board
    from hintloop.rollout.teaching import Asking

    segments: list[Sequence[Episode]] = []

    async def run() -> None:
        async def reply(request: httpx.Request) -> httpx.Response:
            return httpx.Response(200, json=completion([], GOOD))

        async with httpx.AsyncClient(transport=httpx.MockTransport(reply)) as client:
            spec = TeacherSpec(name="one", base_url="http://one/v1", model="m")
            teacher = Teacher(spec, client, timeout_s=5, attempts=1, in_flight=4)
            pacer = Pacer(groups_per_step=2, max_staleness=0, journalled=0, version=0)
            manager = Manager(
                player=make_player(),
                sampling=Sampling(1.0, 400),
                open_environment=world().session,
                task_of=lambda index, attempt=0: "bugfix/x",
                append=segments.append,
                pacer=pacer,
                rule=GroupRule(3, 6, 3, 3, 10.0),
                board=Board(),
                metrics=tmp_path / "metrics.jsonl",
                asking=Asking([teacher], RULE),
            )
            playing = asyncio.create_task(manager.run(set()))
            while pacer.journalled < 2 and not playing.done():  # noqa: ASYNC110 - nothing announces it
                await asyncio.sleep(0.005)
            playing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await playing

    asyncio.run(run())
    assert [len(episode.pairs) for segment in segments for episode in segment] == [1] * 6
