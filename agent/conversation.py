"""A conversation as token ids: what the engine consumed and produced, byte for byte.

Nothing is ever tokenised twice. A new tool result is tokenised once, as a suffix, by the model family's own
renderer, which is shown the last turn only: what a turn costs does not depend on how long the episode is. A hint is
inserted at token level in front of a turn's generation prompt, and the identity of everything around it is checked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any

from renderers import ToolCallParseStatus

from hintloop.agent.engine import Sample
from hintloop.envs.models import ToolCall
from hintloop.replay.episode import NOT_SAMPLED

Message = dict[str, Any]
UNRENDERABLE = (ValueError, TypeError, KeyError, IndexError, AttributeError)
"""What a renderer raises for a conversation that its template does not have."""


class RenderError(Exception):
    """The renderer cannot extend this conversation in place; the reason is in the message."""


@dataclass(frozen=True, slots=True)
class HintInsertion:
    """Where a hint goes and as which tokens; see ``hintloop.replay.episode.HintSite``."""

    insert_at: int
    hint_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Prompt:
    """How the prompt of one assistant turn came about: enough to render it again with one message more."""

    end: int
    """Tokens before the turn, generation prompt included."""
    completion_end: int
    """Tokens before ``messages``; 0 for the first turn."""
    messages: tuple[Message, ...]
    calls: int
    """Calls made in the turns before."""


class Conversation:
    """One growing token sequence with its loss mask, log-probs and policy versions."""

    def __init__(self, renderer: Any, messages: Sequence[Message], *, tools: Sequence[dict[str, Any]] = ()):
        """``renderer`` is a ``renderers.Renderer``; ``tools`` are function specs for the model's own template."""
        self._renderer = renderer
        self._tools = list(tools) or None
        opened = renderer.render_ids(list(messages), tools=self._tools, add_generation_prompt=True)
        closed = renderer.render_ids(list(messages), tools=self._tools, add_generation_prompt=False)
        self._generation_prompt = opened[len(closed) :]
        if opened[: len(closed)] != closed or not self._generation_prompt:
            raise RenderError("this chat template has no separate generation prompt")
        self.token_ids: list[int] = list(opened)
        self.loss_mask: list[int] = [0] * len(opened)
        self.logprobs: list[float] = [0.0] * len(opened)
        self.policy_versions: list[int] = [NOT_SAMPLED] * len(opened)
        self._prompts = [_Prompt(len(opened), 0, tuple(messages), 0)]
        self._num_calls = 0
        self._answers: list[Message] = []
        """One message for each call of the last turn, still without what the call gives."""
        self._looks_back: bool | None = None
        """Whether the renderer needs more than the last turn; None before it was tried."""

    @property
    def num_turns(self) -> int:
        """Assistant turns begun, the pending one included."""
        return len(self._prompts)

    def prompt_end(self, turn: int) -> int:
        """Number of tokens before assistant turn ``turn`` (from 0), generation prompt included."""
        return self._prompts[turn].end

    def add_sample(self, sample: Sample) -> list[ToolCall]:
        """Append what the policy sampled and return the tool calls in it (at least one, perhaps malformed)."""
        self.token_ids += sample.token_ids
        self.loss_mask += [1] * len(sample.token_ids)
        self.logprobs += sample.logprobs
        self.policy_versions += sample.policy_versions
        made = self._read(sample.token_ids)
        self._num_calls += sum(call.malformed is None for call, _ in made)
        self._answers = [_answer(call, id_) for call, id_ in made]
        return [call for call, _ in made]

    def parse(self, completion_ids: Sequence[int]) -> list[ToolCall]:
        """The tool calls in a completion; one malformed call when there is none that can be executed."""
        return [call for call, _ in self._read(completion_ids)]

    def _read(self, completion_ids: Sequence[int]) -> list[tuple[ToolCall, str | None]]:
        """The same, each call with the id that the model gave it, where its format has ids."""
        parsed = self._renderer.parse_response(list(completion_ids), tools=self._tools)
        found = [
            (ToolCall(name=call.name, arguments=call.arguments), call.id)
            for call in parsed.tool_calls
            if call.status in (ToolCallParseStatus.OK, ToolCallParseStatus.UNKNOWN_TOOL)
            and call.name
            and isinstance(call.arguments, dict)
        ]
        if found:
            return found
        raw = parsed.tool_calls[0].raw if parsed.tool_calls else parsed.content
        return [(ToolCall(malformed=raw or ""), None)]

    def add_results(self, outputs: Sequence[str]) -> None:
        """Append the results of the last turn's calls and the next generation prompt. Raises ``RenderError``."""
        self.add_messages(self.results(outputs))

    def results(self, outputs: Sequence[str]) -> list[Message]:
        """What the calls of the last turn gave, as messages."""
        answers = chain(self._answers, repeat({"role": "tool"}))
        return [{**answer, "content": output} for output, answer in zip(outputs, answers, strict=False)]

    def add_messages(self, messages: Sequence[Message]) -> None:
        """Append what follows a turn, and the next generation prompt. Raises ``RenderError``."""
        completion_end = len(self.token_ids)
        suffix = self._bridge(self.num_turns - 1, completion_end, messages)
        self.token_ids += suffix
        self.loss_mask += [0] * len(suffix)
        self.logprobs += [0.0] * len(suffix)
        self.policy_versions += [NOT_SAMPLED] * len(suffix)
        self._prompts.append(_Prompt(len(self.token_ids), completion_end, tuple(messages), self._num_calls))

    def hint(self, turn: int, text: str, *, role: str = "system") -> HintInsertion:
        """Where and as which tokens a hint message goes before assistant turn ``turn``. Raises ``RenderError``."""
        prompt = self._prompts[turn]
        messages = [*prompt.messages, {"role": role, "content": text}]
        if turn == 0:
            hinted = self._renderer.render_ids(messages, tools=self._tools, add_generation_prompt=True)
        else:
            hinted = self._bridge(turn - 1, prompt.completion_end, messages)
        insert_at = prompt.end - len(self._generation_prompt)
        before = self.token_ids[prompt.completion_end : insert_at]
        hint_ids = hinted[len(before) : len(hinted) - len(self._generation_prompt)]
        expected = before + hint_ids + self._generation_prompt
        if not hint_ids or hinted != expected:
            raise RenderError(f"this chat template does not take a {role} message in mid-conversation")
        return HintInsertion(insert_at, tuple(hint_ids))

    def encode_calls(self, turn: int, calls: Sequence[ToolCall]) -> tuple[int, ...]:
        """Tool calls as the tokens of the whole assistant turn ``turn``, end-of-turn token included.

        Raises ``RenderError`` when the template cannot write them, or writes them as others: a special token within,
        say.
        """
        ids = self._written(turn, calls)
        if ids is not None:
            return ids
        if len(calls) > 1 and all(self._written(turn, [call]) is not None for call in calls):
            raise RenderError("this chat template does not take several calls in one turn")
        raise RenderError("this chat template cannot write such a call")

    def _written(self, turn: int, calls: Sequence[ToolCall]) -> tuple[int, ...] | None:
        """A turn of ``calls``; None when they cannot be read in it again."""
        made = [
            # Kimi's template writes an id in the place of the name; others leave it out.
            {
                "id": f"functions.{call.name}:{number}",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for number, call in enumerate(calls, self._prompts[turn].calls)
        ]
        user = {"role": "user", "content": "x"}
        message = {"role": "assistant", "content": "", "tool_calls": made}
        try:
            prefix = self._renderer.render_ids([user], tools=self._tools, add_generation_prompt=True)
            rendered = self._renderer.render_ids([user, message, user], tools=self._tools)
        except UNRENDERABLE:
            return None
        stops = set(self._renderer.get_stop_token_ids())
        body = rendered[len(prefix) :]
        end = next((index for index, token in enumerate(body, 1) if token in stops), None)
        if end is None or rendered[: len(prefix)] != prefix or self.parse(body[:end]) != list(calls):
            return None
        return tuple(body[:end])

    def _bridge(self, turn: int, completion_end: int, messages: Sequence[Message]) -> list[int]:
        """The tokens that follow assistant turn ``turn``, which ends at ``completion_end``."""
        start = self._prompts[turn].end - len(self._generation_prompt)
        if self._looks_back is None:
            whole = self._append(0, turn, completion_end, messages)
            self._looks_back = self._append(start, turn, completion_end, messages) != whole
            return whole
        return self._append(0 if self._looks_back else start, turn, completion_end, messages)

    def _append(self, start: int, turn: int, completion_end: int, messages: Sequence[Message]) -> list[int]:
        """What the renderer appends when it is shown the tokens from ``start`` on."""
        base = self._prompts[turn].end
        prompt, completion = self.token_ids[start:base], self.token_ids[base:completion_end]
        rendered = self._renderer.bridge_to_next_turn(prompt, completion, list(messages), tools=self._tools)
        if rendered is None:
            raise RenderError("the renderer cannot append to this conversation without rewriting it")
        ids, known = list(rendered.token_ids), completion_end - start
        if ids[:known] != prompt + completion:
            raise RenderError("the renderer changed earlier tokens")
        return ids[known:]


def _answer(call: ToolCall, call_id: str | None) -> Message:
    """Templates write the tool's name (Gemma, Kimi, gpt-oss) or the call's id (Kimi) in front of a result."""
    answer: Message = {"role": "tool"}
    if call.malformed is None:
        answer["name"] = call.name
    if call_id is not None:
        answer["tool_call_id"] = call_id
    return answer
