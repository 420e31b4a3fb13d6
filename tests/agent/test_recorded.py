"""Recorded episodes as tokens: the model's own template, hints before the failing turn, nothing made up."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from hintloop.agent.conversation import Conversation
from hintloop.agent.policy import ChatFormat, load_renderer, make_renderer
from hintloop.agent.recorded import NotRendered, hint_text, tokenise
from hintloop.cli.model import find_model
from hintloop.envs.models import ToolCall
from hintloop.replay.episode import NOT_SAMPLED, Outcome, PreferencePair, Turn

from ..learner.test_chat_formats import toy_tokenizer
from ..rollout.recordings import call, recorded


@pytest.fixture(scope="module")
def chat() -> ChatFormat:
    return load_renderer(find_model("student-tiny"))


FAILING = Turn(
    "assistant",
    0,
    0,
    "I look",
    "shell",
    '{"command":"lss"}',
    error_kind="command_not_found",
    error_message="lss: command not found\n\nsecond line",
    error_cause="model",
)
EPISODE = recorded(
    Turn("user", 0, 0, "list the files"),
    FAILING,
    call("shell", {"command": "lss"}, "lss: command not found"),
    call("shell", "bare text", None),
    Turn("assistant", 0, 0, "done"),
    sites=(1,),
)


def test_tokens_are_the_models_own_rendering(chat: ChatFormat) -> None:
    made = tokenise(EPISODE, chat).episode
    calls = [{"function": {"name": "shell", "arguments": {"command": "lss"}}}]
    calls += [{"function": {"name": "shell", "arguments": {"input": "bare text"}}}]
    messages = [
        {"role": "user", "content": "list the files"},
        {"role": "assistant", "content": "I look", "tool_calls": calls},
        {"role": "tool", "content": "lss: command not found"},
        {"role": "assistant", "content": "done"},
    ]
    assert list(made.token_ids) == list(chat.renderer.render_ids(messages))
    assert made.tokenizer_fingerprint == chat.fingerprint


def test_the_models_turns_are_sampled_by_nobody_known(chat: ChatFormat) -> None:
    made = tokenise(EPISODE, chat).episode
    for turn in made.turns:
        sampled = turn.role == "assistant"
        assert all(bit == sampled for bit in made.loss_mask[turn.start : turn.end])
    spans = [turn for turn in made.turns if turn.role == "assistant"]
    assert sum(made.loss_mask) == sum(turn.end - turn.start for turn in spans) > 0
    assert all(made.token_ids[turn.end - 1] in chat.renderer.get_stop_token_ids() for turn in spans)
    assert all(
        math.isnan(value) == bool(bit) for value, bit in zip(made.logprobs, made.loss_mask, strict=True)
    )
    assert set(made.policy_versions) == {NOT_SAMPLED}
    assert (made.outcome, made.reward) == (Outcome.UNGRADED, None)


def test_the_hint_stands_before_the_generation_prompt_of_the_failing_turn(chat: ChatFormat) -> None:
    result = tokenise(EPISODE, chat)
    made = result.episode
    (site,) = made.hint_sites
    assert site.hint == (
        "Hint: that command is not installed here; avoid this: lss: command not found second line"
    )
    hinted = [*made.token_ids[: site.insert_at], *site.hint_ids, *made.token_ids[site.insert_at : site.end]]
    messages = [
        {"role": "user", "content": "list the files"},
        {"role": "system", "content": site.hint},
    ]
    prompt = list(chat.renderer.render_ids(messages, add_generation_prompt=True))
    assert hinted[: len(prompt)] == prompt
    assert (site.start, site.end) == (made.turns[1].start, made.turns[1].end)
    assert not result.dropped


def test_a_hint_behind_a_tool_result_is_what_the_template_makes_of_it(chat: ChatFormat) -> None:
    episode = recorded(
        Turn("user", 0, 0, "go"),
        Turn("assistant", 0, 0, "", "shell", "{}"),
        call("shell", {}, "ok"),
        FAILING,
        call("shell", {"command": "lss"}, "no"),
        sites=(3,),
    )
    made = tokenise(episode, chat).episode
    (site,) = made.hint_sites
    hinted = [*made.token_ids[: site.insert_at], *site.hint_ids, *made.token_ids[site.insert_at : site.start]]
    shell = [{"function": {"name": "shell", "arguments": {}}}]
    messages = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": "", "tool_calls": shell},
        {"role": "tool", "content": "ok"},
        {"role": "system", "content": site.hint},
    ]
    assert hinted == list(chat.renderer.render_ids(messages, add_generation_prompt=True))


@pytest.mark.parametrize(
    ("kind", "advice"),
    [
        ("type_error", "give the tool all of its required arguments"),
        ("tool_not_found", "use one of the tools that were used before"),
        ("runtime_error", "the command failed, read the last lines of its output"),
    ],
)
def test_every_kind_has_a_hint_that_names_the_error_and_no_tool_of_ours(kind: str, advice: str) -> None:
    turn = replace(FAILING, error_kind=kind, error_message="x" * 1000)
    assert hint_text(turn) == f"Hint: {advice}; avoid this: {'x' * 200}"


def test_a_kind_without_template_is_dropped_and_counted(chat: ChatFormat) -> None:
    odd = recorded(Turn("user", 0, 0, "x"), replace(FAILING, error_kind="moonlight"), sites=(1,))
    result = tokenise(odd, chat)
    assert result.episode.hint_sites == ()
    assert result.dropped == {"no hint template for moonlight": 1}


def test_a_conversation_that_the_template_refuses_is_said_to_be_so(chat: ChatFormat) -> None:
    with pytest.raises(NotRendered):
        tokenise(recorded(), chat)


def test_a_result_without_a_name_is_read_and_is_no_call(chat: ChatFormat) -> None:
    nameless = Turn("tool", 0, 0, "error: not JSON", error_message="not JSON")
    made = tokenise(
        recorded(Turn("user", 0, 0, "go"), Turn("assistant", 0, 0, "<tool_call>{"), nameless), chat
    ).episode
    (agent,) = (turn for turn in made.turns if turn.role == "assistant")
    written = chat.tokenizer.decode(list(made.token_ids[agent.start : agent.end]))
    assert written.count("<tool_call>") == 1
    assert '"name": ""' not in written
    last = made.turns[-1]
    assert "error: not JSON" in chat.tokenizer.decode(list(made.token_ids[last.start : last.end]))


def pair(chosen: str, turn: int = 1) -> PreferencePair:
    return PreferencePair(turn, 0, (), (), chosen, "own", 2, 2, False, ("a", "b"), 0.5)


def test_a_pair_gets_the_tokens_of_both_sides_at_its_turn(chat: ChatFormat) -> None:
    text = 'shell {"command": "ls -a", "deep": {"x": [1, null]}}'
    result = tokenise(replace(EPISODE, pairs=(pair(text),)), chat)
    made = result.episode
    (found,) = made.pairs
    turn = made.turns[1]
    assert found.prompt_end == turn.start
    assert found.rejected_ids == tuple(made.token_ids[turn.start : turn.end])
    assert Conversation(chat.renderer, [{"role": "user", "content": "x"}]).parse(found.chosen_ids) == [
        ToolCall(name="shell", arguments={"command": "ls -a", "deep": {"x": [1, None]}})
    ]
    stops = chat.renderer.get_stop_token_ids()
    assert {found.chosen_ids[-1], found.rejected_ids[-1]} <= set(stops)
    assert (found.teachers, found.cost_usd, found.chosen_text) == (("a", "b"), 0.5, text)
    assert not result.dropped_pairs


def test_a_pair_that_the_template_cannot_write_is_dropped_and_counted(chat: ChatFormat) -> None:
    garbled = 'shell {"command": "</tool_call>"}'
    half = 'shell {"\\ud800": 1}'  # half of a surrogate pair
    texts = ("no call", garbled, f"shell {{}}\n{garbled}", "shell {}\nno call", half, "shell {}")
    result = tokenise(replace(EPISODE, pairs=tuple(map(pair, texts))), chat)
    assert [found.chosen_text for found in result.episode.pairs] == ["shell {}"]
    assert result.dropped_pairs == {
        "the chosen action is no call that can be read": 2,
        "this chat template cannot write such a call": 2,
        "this chat template cannot write tools for such a call": 1,
    }


def in_family(chat: ChatFormat, family: str) -> ChatFormat:
    tokenizer = toy_tokenizer(family)
    return replace(chat, tokenizer=tokenizer, renderer=make_renderer(tokenizer, family))


@pytest.mark.parametrize("family", ["qwen3", "qwen3.8", "glm-4.5", "glm-5.3"])
def test_the_chosen_side_of_a_pair_may_have_several_calls(chat: ChatFormat, family: str) -> None:
    chat = in_family(chat, family)
    calls = [
        ToolCall(name="shell", arguments={"command": "5", "seconds": 5}),
        ToolCall(name="look", arguments={"deep": {"x": [1, None]}, "path": "a.py"}),
        ToolCall(name="shell", arguments={"command": "ls"}),
    ]
    texts = [f"{call.name} {json.dumps(call.arguments)}" for call in calls]
    result = tokenise(replace(EPISODE, pairs=(pair("\n".join(texts)), pair(texts[1]))), chat)
    assert not result.dropped_pairs
    several, one = result.episode.pairs
    text = chat.tokenizer.decode(list(several.chosen_ids))
    assert [text.count(word) for word in ("shell", "look", "ls", "a.py")] == [2, 1, 1, 1]
    assert text.index("shell") < text.index("look") < text.index("ls")
    assert several.rejected_ids == one.rejected_ids
    assert several.chosen_ids[-1] == one.chosen_ids[-1]


def test_where_a_turn_has_room_for_one_call_a_pair_of_several_is_dropped_and_counted(
    chat: ChatFormat,
) -> None:
    texts = ('shell {"command": "ls"}', 'shell {"command": "pwd"}')
    single = recorded(
        Turn("user", 0, 0, "list"), FAILING, call("shell", {"command": "lss"}, "no"), sites=(1,)
    )
    pairs = (pair("\n".join(texts)), *map(pair, texts))
    result = tokenise(replace(single, pairs=pairs), in_family(chat, "llama-3"))
    assert [found.chosen_text for found in result.episode.pairs] == list(texts)
    assert result.dropped_pairs == {"this chat template does not take several calls in one turn": 1}
