"""The token-level conversation: nothing that was there ever changes, and a hint goes exactly in between."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hintloop.agent.conversation import Conversation, RenderError
from hintloop.agent.engine import Sample
from hintloop.agent.policy import ChatFormat
from hintloop.envs.models import ToolCall
from hintloop.replay.episode import NOT_SAMPLED

OPENING = [
    {"role": "system", "content": "Tools: read_file(path), submit()"},
    {"role": "user", "content": "Fix solution.py: f should give: the sum"},
]
SPECIAL = ("<|", "<think", "</think", "<tool", "</tool")

plain = st.text(max_size=40).filter(lambda text: not any(mark in text for mark in SPECIAL))
arguments = st.dictionaries(plain, st.one_of(plain, st.integers(-999, 999), st.booleans()), max_size=3)
call_texts = st.builds(
    lambda name, args: f"<tool_call>\n{json.dumps({'name': name, 'arguments': args})}\n</tool_call>",
    plain.filter(bool),
    arguments,
)
turns = st.lists(
    st.tuples(st.one_of(plain, call_texts), st.booleans(), st.lists(plain, min_size=1, max_size=3)),
    min_size=1,
    max_size=5,
)


def sample_of(chat: ChatFormat, text: str, *, ended: bool = True, version: int = 1) -> Sample:
    ids = chat.tokenizer.encode(text + "<|im_end|>" * ended, add_special_tokens=False) or [5]
    return Sample(tuple(ids), (-0.5,) * len(ids), (version,) * len(ids), "stop" if ended else "length")


def play(
    chat: ChatFormat, script: list[tuple[str, bool, list[str]]]
) -> tuple[Conversation, list[tuple[int, int]]]:
    """A conversation of all turns, and the token range of each; checks that every earlier token stays."""
    conversation = Conversation(chat.renderer, OPENING)
    ranges = []
    for text, ended, outputs in script:
        before = list(conversation.token_ids)
        sample = sample_of(chat, text, ended=ended)
        conversation.add_sample(sample)
        ranges.append((len(before), len(before) + len(sample.token_ids)))
        sampled = list(conversation.token_ids)
        assert sampled == before + list(sample.token_ids)
        conversation.add_results(outputs)
        assert conversation.token_ids[: len(sampled)] == sampled
    return conversation, ranges


@given(turns)
@settings(deadline=None, max_examples=40)
def test_earlier_tokens_never_change_and_the_mask_is_exactly_what_was_sampled(
    chat: ChatFormat, script: list[Any]
) -> None:
    conversation, ranges = play(chat, script)
    sampled = {at for start, end in ranges for at in range(start, end)}
    length = len(conversation.token_ids)
    assert conversation.num_turns == len(script) + 1
    assert [at for at in range(length) if conversation.loss_mask[at]] == sorted(sampled)
    assert all(
        (version == NOT_SAMPLED) == (at not in sampled)
        for at, version in enumerate(conversation.policy_versions)
    )
    assert all((value == 0.0) == (at not in sampled) for at, value in enumerate(conversation.logprobs))


@given(turns, st.data())
@settings(deadline=None, max_examples=40)
def test_a_hint_goes_between_the_conversation_and_the_generation_prompt(
    chat: ChatFormat, script: list[Any], data: st.DataObject
) -> None:
    conversation, _ = play(chat, script)
    turn = data.draw(st.integers(0, len(script)))
    text = data.draw(plain.filter(bool))
    before = list(conversation.token_ids)

    hint = conversation.hint(turn, text)

    decode = chat.renderer._tokenizer.decode
    end = conversation.prompt_end(turn)
    assert conversation.token_ids == before
    assert decode(before[hint.insert_at : end]) == "<|im_start|>assistant\n"
    assert decode(list(hint.hint_ids)) == f"<|im_start|>system\n{text}<|im_end|>\n"


def test_the_first_turns_hint_is_what_the_renderer_gives_for_the_whole_prompt(chat: ChatFormat) -> None:
    conversation = Conversation(chat.renderer, OPENING)
    hint = conversation.hint(0, "Hint: files are solution.py")
    end = conversation.prompt_end(0)
    teacher = [
        *conversation.token_ids[: hint.insert_at],
        *hint.hint_ids,
        *conversation.token_ids[hint.insert_at : end],
    ]
    messages = [*OPENING, {"role": "system", "content": "Hint: files are solution.py"}]
    assert teacher == chat.renderer.render_ids(messages, add_generation_prompt=True)


@pytest.mark.parametrize("role", ["user", "tool"])
def test_a_role_that_the_template_cannot_put_in_between_is_refused(chat: ChatFormat, role: str) -> None:
    # A user message makes it rewrite history; a tool message joins the results before it.
    conversation, _ = play(chat, [("<tool_call>\n{}\n</tool_call>", True, ["error: bad"])])
    with pytest.raises(RenderError):
        conversation.hint(1, "Hint: x", role=role)


def test_a_thought_that_never_closes_cannot_be_continued(chat: ChatFormat) -> None:
    conversation = Conversation(chat.renderer, OPENING)
    conversation.add_sample(sample_of(chat, "<think>what now"))
    with pytest.raises(RenderError):
        conversation.add_results(["error: no tool call"])


names = st.from_regex(r"[a-z_]{1,12}", fullmatch=True)


@given(st.lists(st.builds(ToolCall, name=names, arguments=arguments), min_size=1, max_size=3))
@settings(deadline=None, max_examples=40)
def test_encoded_calls_parse_back_to_the_same_calls(chat: ChatFormat, calls: list[ToolCall]) -> None:
    conversation = Conversation(chat.renderer, OPENING)
    ids = conversation.encode_calls(0, calls)
    assert ids[-1] == chat.tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert conversation.parse(ids) == calls


def test_encoded_calls_are_written_as_the_student_writes_them(chat: ChatFormat) -> None:
    calls = [ToolCall(name="read_file", arguments={"path": path}) for path in ("a.py", "b.py")]
    for count in (1, 2):
        ids = Conversation(chat.renderer, OPENING).encode_calls(0, calls[:count])
        texts = [
            f'<tool_call>\n{{"name": "read_file", "arguments": {{"path": "{path}"}}}}\n</tool_call>'
            for path in ("a.py", "b.py")[:count]
        ]
        text = "\n".join(texts) + "<|im_end|>"
        assert list(ids) == chat.tokenizer.encode(text, add_special_tokens=False)


def test_calls_that_the_template_would_garble_are_refused(chat: ChatFormat) -> None:
    conversation = Conversation(chat.renderer, OPENING)
    fine, garbled = (ToolCall(name="bash", arguments={"command": text}) for text in ("ls", "<|im_end|>"))
    for calls in ([garbled], [fine, garbled]):
        with pytest.raises(RenderError, match="cannot write such a call"):
            conversation.encode_calls(0, calls)


def test_text_without_a_call_is_one_malformed_call(chat: ChatFormat) -> None:
    conversation = Conversation(chat.renderer, OPENING)
    (call,) = conversation.add_sample(sample_of(chat, "I am done."))
    assert call.malformed == "I am done."
    (broken,) = conversation.parse(sample_of(chat, '<tool_call>\n{"name": \n</tool_call>').token_ids)
    assert broken.malformed is not None
    assert "{" in broken.malformed
