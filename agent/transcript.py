"""The transcript of one episode in its three forms: tokens, ``Turn`` records and OpenAI chat messages."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hintloop.agent import hints
from hintloop.agent.conversation import Conversation, Message, RenderError
from hintloop.agent.engine import Sample
from hintloop.agent.policy import ChatFormat, first_messages
from hintloop.envs.errors import Cause, ToolError
from hintloop.envs.models import TaskInfo, ToolCall, ToolResult
from hintloop.replay.episode import HintSite, Turn


@dataclass(frozen=True, slots=True)
class EpisodeSpec:
    """Which episode to play."""

    episode_id: str
    group_id: str
    task_id: str
    source: str = "rollout"


@dataclass(frozen=True, slots=True)
class TurnEvent:
    """One assistant turn that has been played, for whoever watches the episode."""

    spec: EpisodeSpec
    conversation: Conversation
    turn: int
    """Number of the assistant turn, from 0."""
    episode_turn: int
    """Index of the turn in ``Episode.turns``."""
    messages: tuple[Message, ...]
    """The transcript before this turn, in the OpenAI chat form."""
    task: TaskInfo
    calls: tuple[ToolCall, ...]
    errors: tuple[ToolError, ...]
    """Those that the model caused first."""
    sampled_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Of the sampled tokens, nats."""
    step: int
    """Number of the turn's first call among all calls of the episode, from 1."""
    ended: bool
    """The turn ends with an end-of-turn token; False when it was cut for its length."""
    text: str


@dataclass(frozen=True, slots=True)
class EpisodeNotes:
    """What happened on the way and is no part of the episode."""

    errors: Counter[str] = field(default_factory=Counter)
    """Tool errors by kind, whatever their cause."""
    dropped_sites: Counter[str] = field(default_factory=Counter)
    """Errors of the agent that got no hint site, by reason."""
    render_failures: int = 0
    """1 when the chat template could not append a tool result, which ended the episode as truncated."""
    overridden: Counter[str] = field(default_factory=Counter)
    """Questions of an agent program with a sampling setting that was not applied, by its name."""


class Transcript:
    """Grows by one assistant turn and its results at a time."""

    def __init__(
        self,
        chat: ChatFormat,
        spec: EpisodeSpec,
        task: TaskInfo,
        opening: tuple[Sequence[Message], Sequence[dict[str, Any]]] | None = None,
    ):
        """``opening``: the first messages and the tools in them; None: those that the chat format gives the task."""
        messages, tools = first_messages(task, chat.prompt) if opening is None else opening
        self.spec = spec
        self.conversation = Conversation(chat.renderer, messages, tools=tools)
        self.turns: list[Turn] = []
        self.submitted = False
        self._chat = chat
        self._task = task
        self._messages: list[Message] = list(messages)
        self._sampled: list[Sample] = []
        self._errors: list[tuple[int, ToolError, dict[str, Any]]] = []
        self._assistants: list[int] = []
        self._kinds: Counter[str] = Counter()
        self._dropped: Counter[str] = Counter()
        self._render_failures = 0
        self._steps = 0
        closed = chat.renderer.render(list(messages), tools=list(tools) or None)
        self._prompt_tokens = self.conversation.prompt_end(0) - len(closed.token_ids)
        for number, message in enumerate(messages):
            own = [at for at, index in enumerate(closed.message_indices) if index == number]
            start, end = (own[0], own[-1] + 1) if own else (0, 0)
            # What an agent says that its model has said is context: nothing of it was sampled here.
            role = "context" if message["role"] == "assistant" else message["role"]
            self.turns.append(Turn(role=role, start=start, end=end, text=message["content"]))

    def add_sample(self, sample: Sample) -> list[ToolCall]:
        """Append an assistant turn; its calls."""
        start = len(self.conversation.token_ids)
        calls = self.conversation.add_sample(sample)
        first = calls[0]
        self._assistants.append(len(self.turns))
        self._sampled.append(sample)
        self.turns.append(
            Turn(
                role="assistant",
                start=start,
                end=start + len(sample.token_ids),
                text=self._decode(sample),
                tool_name=None if first.malformed is not None else first.name,
                tool_arguments=None if first.malformed is not None else json.dumps(first.arguments),
            )
        )
        return calls

    def turn_done(self, calls: Sequence[ToolCall], results: Sequence[ToolResult]) -> TurnEvent:
        """Record what the calls of the last turn gave."""
        before = tuple(self._messages)
        made = list(zip(calls, results, strict=False))
        self._note_errors(made)
        self.turns += [self._tool_turn(call, result) for call, result in made]
        self._add_messages(calls[: len(results)], results)
        return self._event(before, calls, results)

    def turn_answered(
        self,
        calls: Sequence[ToolCall],
        made: Sequence[tuple[ToolCall, ToolResult]],
        followed: Sequence[Message],
    ) -> TurnEvent:
        """The same for an agent that runs what it wants: ``made`` are the calls that the turn led to, with what
        they gave, and ``followed`` the messages that the agent goes on with, if it does; ``append`` has to follow then.
        """
        self._note_errors(made)
        for number in range(max(len(made), len(followed))):
            turn = self._tool_turn(*made[number]) if number < len(made) else self._turn_here("tool", "")
            if number < len(followed):
                turn = replace(turn, role=followed[number]["role"], text=followed[number]["content"])
            self.turns.append(turn)
        return self._event((), calls, [result for _, result in made])

    def add_results(self, outputs: Sequence[str]) -> bool:
        """Append tool results to the tokens; False when the chat template cannot."""
        return self.append(self.conversation.results(outputs))

    def append(self, messages: Sequence[Message]) -> bool:
        """Append what follows the last turn to the tokens; False when the chat template cannot."""
        start = len(self.conversation.token_ids)
        try:
            self.conversation.add_messages(messages)
        except RenderError:
            self._render_failures += 1
            return False
        # They are rendered in one piece: the first turn of them has the tokens, the others none.
        end = len(self.conversation.token_ids) - self._prompt_tokens
        first = self._assistants[-1] + 1
        self.turns[first] = replace(self.turns[first], start=start, end=end)
        for index in range(first + 1, len(self.turns)):
            self.turns[index] = replace(self.turns[index], start=end, end=end)
        return True

    def cut_tail(self) -> None:
        """Let the transcript end with the last assistant turn: nobody has read what came after it."""
        last = self._assistants[-1]
        end = self.turns[last].end
        for index in range(last + 1, len(self.turns)):
            self.turns[index] = replace(self.turns[index], start=end, end=end)

    def hint_sites(self, role: str) -> tuple[HintSite, ...]:
        """One site for each error that the agent caused; what cannot be one is counted with its reason."""
        sites: dict[int, HintSite] = {}
        for failing, error, known in self._errors:
            if error.cause is not Cause.MODEL:
                continue
            site = self._hint_site(failing, error, known, role)
            if site is not None:
                sites[failing] = site
        return tuple(sites.values())

    def _note_errors(self, made: Sequence[tuple[ToolCall, ToolResult]]) -> None:
        """Count the errors of the last turn; the first that the model caused becomes its own, or else the first."""
        failed = [(call, result, result.error) for call, result in made if result.error is not None]
        failed.sort(key=lambda each: _other_cause(each[2]))
        self._kinds.update(error.kind for _, _, error in failed)
        if not failed:
            return
        call, result, first = failed[0]
        known = hints.context(self._task.tools, call, result.output, self._task.files)
        self._errors.append((len(self._assistants) - 1, first, known))
        index = self._assistants[-1]
        self.turns[index] = replace(
            self.turns[index],
            error_kind=first.kind,
            error_message=first.message,
            error_cause=first.cause.value,
        )

    def _tool_turn(self, call: ToolCall, result: ToolResult) -> Turn:
        self.submitted |= call.malformed is None and call.name == "submit" and result.error is None
        return replace(
            self._turn_here("tool", result.output),
            tool_name=None if call.malformed is not None else call.name,
            exit_code=result.exit_code,
            seconds=result.seconds,
        )

    def _turn_here(self, role: str, text: str) -> Turn:
        here = len(self.conversation.token_ids)
        return Turn(role=role, start=here, end=here, text=text)

    def _event(
        self, before: tuple[Message, ...], calls: Sequence[ToolCall], results: Sequence[ToolResult]
    ) -> TurnEvent:
        """What whoever watches is told of the last turn."""
        self._steps += len(results)
        index, sample = self._assistants[-1], self._sampled[-1]
        return TurnEvent(
            spec=self.spec,
            conversation=self.conversation,
            turn=len(self._assistants) - 1,
            episode_turn=index,
            messages=before,
            task=self._task,
            calls=tuple(calls),
            errors=tuple(
                sorted((result.error for result in results if result.error is not None), key=_other_cause)
            ),
            sampled_ids=sample.token_ids,
            logprobs=sample.logprobs,
            step=self._steps + 1 - len(results),
            ended=sample.finish_reason == "stop",
            text=self.turns[index].text,
        )

    def _hint_site(self, turn: int, error: ToolError, known: dict[str, Any], role: str) -> HintSite | None:
        try:
            text = hints.dispatch(error, known)
        except KeyError:
            self._dropped[f"no hint template for {error.kind}"] += 1
            return None
        try:
            insertion = self.conversation.hint(turn, text or "", role=role)
        except RenderError as problem:
            self._dropped[str(problem)] += 1
            return None
        index = self._assistants[turn]
        return HintSite(
            turn=index,
            kind=error.kind,
            hint=text or "",
            insert_at=insertion.insert_at,
            start=self.turns[index].start,
            end=self.turns[index].end,
            hint_ids=insertion.hint_ids,
        )

    def notes(self) -> EpisodeNotes:
        return EpisodeNotes(self._kinds, self._dropped, self._render_failures)

    def _decode(self, sample: Sample) -> str:
        ids = sample.token_ids
        body = ids[:-1] if sample.finish_reason == "stop" else ids
        text: str = self._chat.tokenizer.decode(list(body))
        return text

    def _add_messages(self, calls: Sequence[ToolCall], results: Sequence[ToolResult]) -> None:
        """The turn as OpenAI chat messages. What could not be parsed is text, its result a user message."""
        turn = len(self._assistants) - 1
        if calls[0].malformed is not None:
            self._messages.append({"role": "assistant", "content": self.turns[self._assistants[-1]].text})
            self._messages.append({"role": "user", "content": results[0].output})
            return
        made = [
            {
                "id": f"call_{turn}_{number}",
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
            }
            for number, call in enumerate(calls)
        ]
        self._messages.append({"role": "assistant", "content": "", "tool_calls": made})
        for number, result in enumerate(results):
            reply = {"role": "tool", "tool_call_id": f"call_{turn}_{number}", "content": result.output}
            self._messages.append(reply)


def _other_cause(error: ToolError) -> bool:
    """Sorts errors: what the model got wrong is the mistake of a turn, also behind a test that fails."""
    return error.cause is not Cause.MODEL
