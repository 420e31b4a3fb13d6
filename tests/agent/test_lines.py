"""Conversations that a program continues, retries and rewrites, in any order."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from hintloop.agent.chat_messages import read_request
from hintloop.agent.engine import Sample
from hintloop.agent.lines import Answer, Lines
from hintloop.agent.policy import ChatFormat, retaining
from hintloop.agent.transcript import EpisodeSpec
from hintloop.envs.models import TaskInfo, ToolCall
from hintloop.envs.tools import TOOL_PROMPT, TOOLS

SPEC = EpisodeSpec("g000000-0", "g000000", "bugfix/x")
TASK = TaskInfo(task_id="x", instruction="Fix it", files=[], tools=[], tool_prompt=TOOL_PROMPT, max_turns=8)
BASH = {"type": "function", "function": TOOLS["bash"]}


def ask(
    lines: Lines, chat: ChatFormat, messages: list[Any], text: str, tools: tuple[Any, ...] = ()
) -> Answer:
    """One question and its answer, with what has to hold at each."""
    request = read_request({"messages": messages, "tools": list(tools)})
    before = {id(line): list(line.prompt_ids) for line in lines.all}
    line, _ = lines.find(request)
    for old in lines.all:
        assert old.prompt_ids[: len(before.get(id(old), []))] == before.get(id(old), [])
    decoded = chat.tokenizer.decode(line.prompt_ids)
    rendered = chat.renderer.render_ids(list(request.messages), tools=list(request.tools) or None)
    assert decoded == chat.tokenizer.decode(rendered) + "<|im_start|>assistant\n"
    ids = (*chat.tokenizer.encode(text, add_special_tokens=False), chat.renderer.get_stop_token_ids()[0])
    sample = Sample(ids, (-0.5,) * len(ids), (1,) * len(ids), "stop")
    answer = lines.answer(line, sample, request.sent)
    conversation = line.log.conversation
    assert sum(conversation.loss_mask) == line.sampled
    assert sum(conversation.logprobs) == -0.5 * line.sampled
    return answer


def test_lines_grow_fork_and_begin_anew(chat: ChatFormat) -> None:
    chat = retaining(chat)

    @given(
        st.lists(
            st.tuples(st.sampled_from(["go on", "again", "back", "rewrite"]), st.integers(0, 5)), max_size=8
        )
    )
    def check(moves: list[tuple[str, int]]) -> None:
        lines = Lines(chat, SPEC, TASK)
        messages: list[Any] = [{"role": "user", "content": "begin"}]
        messages.append(ask(lines, chat, messages, "first").reply.message)
        expected = 1
        for number, (move, value) in enumerate(moves):
            if move == "go on":
                messages.append({"role": "user", "content": f"more {value}"})
            elif move == "again":
                messages.pop()
                expected += 1
            elif move == "back":
                messages = [*messages[: 2 * (value % (len(messages) // 2)) + 2]]
                messages.append({"role": "user", "content": f"other {number}"})
                expected += 1
            else:
                messages = [messages[0], {"role": "assistant", "content": f"new {number}"}]
                messages.append({"role": "user", "content": "and now"})
                expected += 1
            messages.append(ask(lines, chat, messages, f"answer {number}").reply.message)
        assert len(lines.all) <= expected
        if all(move == "go on" for move, _ in moves):
            assert len(lines.all) == 1
        assert lines.num_answers == len(moves) + 1

    check()


def test_a_rejected_retry_shares_its_tokens_with_the_line_it_left(chat: ChatFormat) -> None:
    chat = retaining(chat)
    lines = Lines(chat, SPEC, TASK)
    messages: list[Any] = [{"role": "user", "content": "begin"}]
    messages.append(ask(lines, chat, messages, "one").reply.message)
    messages.append({"role": "tool", "content": "result"})
    ask(lines, chat, messages, "bad")
    ask(lines, chat, messages, "good")
    left, kept = lines.all
    shared = left.log.conversation.prompt_end(1)
    assert left.prompt_ids[:shared] == kept.prompt_ids[:shared]
    assert left.log.conversation.loss_mask[:shared] == kept.log.conversation.loss_mask[:shared]
    assert [answer.number for answer in kept.answers] == [0, 2]


def test_other_tools_are_another_conversation(chat: ChatFormat) -> None:
    chat = retaining(chat)
    lines = Lines(chat, SPEC, TASK)
    messages: list[Any] = [{"role": "user", "content": "begin"}]
    messages.append(ask(lines, chat, messages, "one").reply.message)
    messages.append({"role": "user", "content": "go on"})
    ask(lines, chat, messages, "two", tools=(BASH,))
    assert len(lines.all) == 2
    assert sum(lines.all[1].log.conversation.loss_mask) == len(chat.tokenizer.encode("two")) + 1


def test_a_template_that_takes_thoughts_out_begins_anew_unless_told_to_keep_them(chat: ChatFormat) -> None:
    for form, count in ((chat, 2), (retaining(chat), 1)):
        lines = Lines(form, SPEC, TASK)
        messages: list[Any] = [{"role": "user", "content": "begin"}]
        messages.append(ask(lines, form, messages, "one").reply.message)
        messages.append({"role": "user", "content": "go on"})
        ask(lines, form, messages, "two")
        assert len(lines.all) == count
        messages = [*messages]
        ask(lines, form, messages, "three")
        assert len(lines.all) == count + 1


def test_a_call_is_the_models_when_it_wrote_it(chat: ChatFormat) -> None:
    chat = retaining(chat)
    text = '<tool_call>\n{"name": "bash", "arguments": {"command": "grep -n x a.py | head"}}\n</tool_call>'
    answer = ask(Lines(chat, SPEC, TASK), chat, [{"role": "user", "content": "x"}], text, tools=(BASH,))

    def bash(command: str) -> ToolCall:
        return ToolCall(name="bash", arguments={"command": command})

    assert answer.wrote(bash("grep -n x a.py | head"))
    assert answer.wrote(bash("cd /work && grep -n x a.py | head"))
    assert not answer.wrote(bash("git add -A && git diff --cached HEAD"))
    assert not answer.wrote(bash("uname -a"))
    assert not answer.wrote(ToolCall(name="submit"))
    plain = ask(
        Lines(chat, SPEC, TASK), chat, [{"role": "user", "content": "x"}], f"```\n{json.dumps('ls')}\n```"
    )
    assert plain.wrote(bash("ls"))
