"""Hints in real chat formats, from the conversation to the states that the learner compares."""

from __future__ import annotations

import functools
import re
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hintloop.agent.chat_messages import read_reply
from hintloop.agent.conversation import Conversation, RenderError
from hintloop.agent.engine import Sample
from hintloop.agent.policy import make_renderer
from hintloop.agent.student.tokenizer import train_tokenizer
from hintloop.envs.models import ToolCall
from hintloop.learner.batch import BatchRules, build_step
from hintloop.learner.packing import Packed
from hintloop.learner.tensors import MicroBatch
from hintloop.replay.episode import Episode, HintSite, Outcome, Turn

HINT = "The file is called solution.py"
SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
TOOLS = [
    {"type": "function", "function": {"name": "read_file", "description": "Read.", "parameters": SCHEMA}}
]
OPENING = [{"role": "system", "content": "You fix code."}, {"role": "user", "content": "Fix solution.py"}]
PATHS = ("README", "solutoin.py", "solution.py", "end.py")
RESULTS = ("A small project", "No such file: solutoin.py", "1: x = 1", "done")
FAILING = 1
"""The second turn misspells the path."""

_QWEN = (
    "<|endoftext|> <|im_start|> <|im_end|> <think> </think> <tool_call> </tool_call> <tool_response> "
    "</tool_response> <|vision_start|> <|vision_end|> <|image_pad|> <|video_pad|>"
)
_GLM = (
    "<|endoftext|> [gMASK] <sop> <|system|> <|user|> <|assistant|> <|observation|> <think> </think> <tool_call> "
    "</tool_call> <arg_key> </arg_key> <arg_value> </arg_value> <tool_response> </tool_response> <tools> </tools>"
)
SPECIAL = {
    "qwen3": _QWEN,
    "qwen3.8": _QWEN,
    "glm-4.5": _GLM,
    "glm-5.3": _GLM,
    "llama-3": "<|begin_of_text|> <|end_of_text|> <|start_header_id|> <|end_header_id|> <|eot_id|> <|eom_id|> "
    "<|python_tag|>",
    "kimi-k2": "[BOS] [EOS] <think> </think> <|im_system|> <|im_user|> <|im_assistant|> <|im_middle|> <|im_end|> "
    "<|tool_calls_section_begin|> <|tool_calls_section_end|> <|tool_call_begin|> <|tool_call_end|> "
    "<|tool_call_argument_begin|>",
    "gemma4": "<bos> <eos> <|turn> <turn|> <|channel> <channel|> <|tool> <tool|> <|tool_call> <tool_call|> "
    '<|tool_response> <tool_response|> <|think|> <|"|> <|image> <image|> <|image|>',
}
FAMILIES = sorted(set(SPECIAL) - {"gemma4"})


def toy_tokenizer(family: str) -> Any:
    """Bytes, and the special tokens of a family."""
    tokenizer = train_tokenizer(["read_file path solution.py"] * 8)
    tokenizer.add_tokens(SPECIAL[family].split(), special_tokens=True)
    return tokenizer


@functools.cache
def played(family: str) -> tuple[Any, Conversation, list[Turn]]:
    """The tokenizer, a conversation with one failing call, and its turns."""
    tokenizer = toy_tokenizer(family)
    conversation = Conversation(make_renderer(tokenizer, family), OPENING, tools=TOOLS)
    turns = []
    for path, result in zip(PATHS, RESULTS, strict=True):
        ids = conversation.encode_calls(
            len(turns) // 2, [ToolCall(name="read_file", arguments={"path": path})]
        )
        start = len(conversation.token_ids)
        conversation.add_sample(Sample(ids, (-0.5,) * len(ids), (0,) * len(ids), "stop"))
        turns.append(Turn("assistant", start, start + len(ids), path))
        turns.append(Turn("tool", start + len(ids), start + len(ids), result))
        conversation.add_results([result])
    return tokenizer, conversation, turns


def episode_of(conversation: Conversation, turns: list[Turn], name: str, reward: float) -> Episode:
    insertion, failing = conversation.hint(FAILING, HINT), turns[2 * FAILING]
    site = HintSite(
        2 * FAILING,
        "file_not_found",
        HINT,
        insertion.insert_at,
        failing.start,
        failing.end,
        insertion.hint_ids,
    )
    return Episode(
        episode_id=name,
        group_id="g",
        task_id="toy/1",
        env="toy",
        source="rollout",
        created_at=0.0,
        model="toy",
        tokenizer_fingerprint="none",
        token_ids=tuple(conversation.token_ids),
        loss_mask=tuple(conversation.loss_mask),
        logprobs=tuple(conversation.logprobs),
        policy_versions=tuple(conversation.policy_versions),
        turns=tuple(turns),
        outcome=Outcome.SOLVED if reward else Outcome.FAILED,
        reward=reward,
        hint_sites=(site,),
    )


class Seen:
    """The tokens that a state sees, its own included."""

    def __init__(self, rows: Packed) -> None:
        self._ids, self._mask = rows.ids, rows.mask()[:, 0] == 0

    def __call__(self, row: int, column: int) -> list[int]:
        ids: list[int] = self._ids[row, self._mask[row, column]].tolist()
        return ids


def step(
    episodes: list[Episode], vocabulary: int, site: Literal["failing", "recovery"], cap: int | None
) -> MicroBatch:
    rules = BatchRules(vocabulary, max_tokens=cap, site=site)
    batch = build_step([episodes], rules, version=0, seed=(0,))
    assert batch.counts["sites"] == len(episodes)
    assert batch.counts["sites_unusable"] == batch.counts["sites_too_long"] == 0
    return batch.micro_batches[0]


@pytest.mark.parametrize("capped", [False, True], ids=["whole", "cut"])
@pytest.mark.parametrize("site", ["failing", "recovery"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_hint_stands_right_before_the_compared_turn_and_only_assistant_tokens_are_trained(
    family: str, site: Literal["failing", "recovery"], capped: bool
) -> None:
    tokenizer, conversation, turns = played(family)
    episodes = [episode_of(conversation, turns, f"e{reward}", reward) for reward in (0.0, 1.0)]
    target = turns[2 * FAILING if site == "failing" else 2 * FAILING + 2]
    ids, hint = conversation.token_ids, list(episodes[0].hint_sites[0].hint_ids)
    opening = ids[episodes[0].hint_sites[0].insert_at : turns[2 * FAILING].start]
    cap = target.end + len(hint) - 7 if capped else None
    micro = step(episodes, len(tokenizer), site, cap)
    begin = 7 if capped else 0
    count = target.end - target.start
    assert len(micro.student_index) == len(micro.teacher_index) == 2 * count
    indices = zip(micro.student_index.tolist(), micro.teacher_index.tolist(), strict=True)
    by_student, by_teacher = Seen(micro.student), Seen(micro.teacher)
    for number, (student, teacher) in enumerate(indices):
        token = target.start + number % count
        said = ids[target.start : token]
        plain, hinted = by_student(*student), by_teacher(*teacher)
        assert plain == ids[begin:token]
        assert hinted == ids[begin : target.start - len(opening)] + hint + opening + said
        assert HINT in tokenizer.decode(hinted)
        assert HINT not in tokenizer.decode(plain)
        assert tokenizer.decode(hinted).count(HINT) == 1
    assistant = {n for turn in turns if turn.role == "assistant" for n in range(turn.start, turn.end)}
    columns = {(row, column) for row, column in micro.trained.nonzero().tolist()}
    assert columns
    assert {column for _, column in columns} <= assistant
    assert all(micro.student.ids[row, column] == ids[column] for row, column in columns)
    if not capped:
        assert {column for _, column in columns} == assistant


@pytest.mark.parametrize("family", FAMILIES)
def test_the_recorded_turn_of_a_format_reads_as_the_call_that_was_made(family: str) -> None:
    tokenizer, conversation, turns = played(family)
    for turn, path in zip(turns[::2], PATHS, strict=True):
        text = tokenizer.decode(conversation.token_ids[turn.start : turn.end])
        assert path in text
        assert "read_file" in text


COMMAND = {"type": "object", "properties": {"command": {"type": "string"}, "seconds": {"type": "number"}}}
SHELL = {"type": "function", "function": {"name": "shell", "description": "Run.", "parameters": COMMAND}}
plain = st.text(
    st.characters(codec="ascii", exclude_characters="<>|", exclude_categories=["Cc"]), max_size=20
)
words = plain.map(str.strip)
actions = st.one_of(
    st.builds(lambda path: ToolCall(name="read_file", arguments={"path": path}), words),
    st.builds(
        lambda command, seconds: ToolCall(name="shell", arguments={"command": command, "seconds": seconds}),
        words,
        st.integers(0, 99),
    ),
)


@pytest.mark.parametrize("family", sorted(set(SPECIAL) - {"llama-3"}))
def test_a_turn_of_several_calls_reads_as_the_calls_that_were_made(family: str) -> None:
    conversation = Conversation(make_renderer(toy_tokenizer(family), family), OPENING, tools=[*TOOLS, SHELL])

    @given(st.lists(actions, min_size=1, max_size=3))
    @settings(deadline=None, max_examples=30)
    def check(calls: list[ToolCall]) -> None:
        ids = conversation.encode_calls(0, calls)
        assert conversation.parse(ids) == calls
        assert ids[-1] in conversation._renderer.get_stop_token_ids()

    check()


def test_a_format_that_takes_one_call_in_a_turn_says_so() -> None:
    _, conversation, _ = played("llama-3")
    calls = [ToolCall(name="read_file", arguments={"path": path}) for path in PATHS]
    for call in calls:
        assert conversation.parse(conversation.encode_calls(0, [call])) == [call]
    with pytest.raises(RenderError, match="does not take several calls in one turn"):
        conversation.encode_calls(0, calls)


def test_kimi_numbers_calls_through_the_whole_conversation() -> None:
    tokenizer, conversation, _ = played("kimi-k2")
    calls = [ToolCall(name="read_file", arguments={"path": path}) for path in PATHS[:2]]
    text = tokenizer.decode(list(conversation.encode_calls(2, calls)))
    assert re.findall(r"functions\.read_file:\d+", text) == ["functions.read_file:2", "functions.read_file:3"]


def test_results_are_told_by_the_name_or_the_id_of_their_call() -> None:
    tokenizer, conversation, _ = played("kimi-k2")
    text = tokenizer.decode(conversation.token_ids)
    assert re.findall(r"<.im_system.>\s?(\w+)<.im_middle.>", text)[-len(PATHS) :] == ["read_file"] * len(
        PATHS
    )
    ids = [f"functions.read_file:{number}" for number in range(len(PATHS))]
    assert re.findall(r"Return of (\S+)", text) == ids
    tokenizer, conversation, _ = played("gemma4")
    assert tokenizer.decode(conversation.token_ids).count("response:read_file") == len(PATHS)


def test_an_agent_program_is_told_the_id_that_the_model_gave_to_its_call() -> None:
    tokenizer, conversation, _ = played("kimi-k2")
    ids = conversation.encode_calls(1, [ToolCall(name="read_file", arguments={"path": "a"})])
    parsed = make_renderer(tokenizer, "kimi-k2").parse_response(list(ids), tools=TOOLS)
    (made,) = read_reply(parsed, tokenizer.decode(list(ids)), TOOLS, 0).message["tool_calls"]
    assert made["id"] == "functions.read_file:1"


def test_a_format_that_takes_no_hint_in_mid_conversation_says_so() -> None:
    _, conversation, _ = played("gemma4")
    with pytest.raises(RenderError):
        conversation.hint(FAILING, HINT)
