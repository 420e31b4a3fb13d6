"""The conversations of an agent program, told apart by what it sends: each in tokens, each growing in place.

A program sends all messages at every turn. Where they go on from an answer as it was given, that line grows:
earlier tokens stay byte for byte, and only what is new is tokenised. Where they go on from an earlier answer (a
retry), a new line takes over the tokens up to there. Where the history is another one (rewritten, summed up, a
side question), a line begins anew: its history is a prompt, nothing of it counts as sampled. Nothing of this is
silent: lines are counted, and what is not in the line that becomes the episode is reported.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hintloop.agent.chat_messages import ChatRequest, Key, Reply, read_reply
from hintloop.agent.conversation import UNRENDERABLE, Message, RenderError
from hintloop.agent.engine import Sample
from hintloop.agent.policy import ChatFormat
from hintloop.agent.transcript import EpisodeSpec, Transcript, TurnEvent
from hintloop.envs.models import TaskInfo, ToolCall, ToolResult


@dataclass(slots=True, eq=False)
class Answer:
    """One answer of the model, and what came of it."""

    number: int
    """Among all answers of the episode, from 0."""
    asked: tuple[Message, ...]
    """The messages that it answers, in the OpenAI form."""
    sample: Sample
    reply: Reply
    made: list[tuple[ToolCall, ToolResult]] = field(default_factory=list)
    """The calls that it led to, with what they gave."""
    problem: tuple[ToolCall, ToolResult] | None = None
    """A call that nobody could make, with what is wrong about it; counts where the program made none."""
    step: int = 0
    """Number of the first of them among all calls of the episode, from 1; 0: none yet."""

    @property
    def results(self) -> list[tuple[ToolCall, ToolResult]]:
        """What came of it, made or not."""
        return self.made or ([self.problem] if self.problem is not None else [])

    def wrote(self, call: ToolCall) -> bool:
        """Whether a call is the model's: what runs is what it wrote, or most of what runs is."""
        if call in self.reply.calls:
            return True
        longest = max(_strings(call.arguments), key=len, default=call.name)
        ran = (longest if call.malformed is None else call.malformed).strip()
        given = [text.strip() for own in self.reply.calls for text in _strings(own.arguments)]
        written = [self.reply.message["content"], self.reply.broken or "", *given]
        mostly = any(text in ran and 2 * len(text) >= len(ran) for text in given)
        return mostly or any(ran in text for text in written)


class Line:
    """One conversation. Its transcript ends with a generation prompt, or with the answer to it."""

    def __init__(self, log: Transcript, request: ChatRequest):
        """``log`` was opened with the request."""
        self.log = log
        self.tools = request.tools
        self.opening = request
        self.keys: list[Key] = list(request.keys)
        self.ends: list[int] = []
        """For each answer, how many keys there are up to it."""
        self.answers: list[Answer] = []
        self._followed: list[tuple[Message, ...]] = []
        self._closed = 0
        """Turns whose results are in the transcript."""

    @property
    def prompt_ids(self) -> list[int]:
        """All tokens so far."""
        return self.log.conversation.token_ids

    @property
    def sampled(self) -> int:
        """Tokens that the model sampled in it."""
        return sum(len(answer.sample.token_ids) for answer in self.answers)

    def shares(self, request: ChatRequest) -> int | None:
        """How many answers of this line the request goes on from, 0: it asks the opening again; None: it does not."""
        if request.tools != self.tools:
            return None
        stuck = len(self._followed) < self._closed  # what follows the last answer could not be appended
        for count in range(len(self.ends) - stuck, 0, -1):
            end = self.ends[count - 1]
            rest = request.keys[end:]
            if rest and list(request.keys[:end]) == self.keys[:end]:
                return None if any(role == "assistant" for role, _, _ in rest) else count
        return 0 if list(request.keys) == list(self.opening.keys) else None

    def add(self, answer: Answer) -> None:
        """Append an answer."""
        self.log.add_sample(answer.sample)
        self.answers.append(answer)
        self.keys.append(answer.reply.key)
        self.ends.append(len(self.keys))

    def close_turn(self, followed: Sequence[Message] = ()) -> TurnEvent | None:
        """Record what came of the last answer, and what the program goes on with; None when that is done already."""
        if self._closed == len(self.answers):
            return None
        self._closed += 1
        answer = self.answers[-1]
        event = self.log.turn_answered(answer.reply.calls, answer.results, followed)
        return replace(event, messages=answer.asked, step=answer.step)

    def go_on(self, request: ChatRequest) -> TurnEvent | None:
        """Append the messages behind the last answer; None when the chat template cannot do that in place."""
        new = len(self.keys)
        event = self.close_turn(request.messages[new:])
        if not self.log.append(request.messages[new:]):
            return None
        self.keys += request.keys[new:]
        self._followed.append(tuple(request.messages[new:]))
        return event

    def fork(self, log: Transcript, count: int) -> Line:
        """A line with the first ``count`` answers of this one; ``log`` was just opened with its opening."""
        copy = Line(log, self.opening)
        for number, answer in enumerate(self.answers[:count]):
            copy.add(answer)
            if number < count - 1:
                copy.close_turn(self._followed[number])
                assert log.append(self._followed[number]), "what was appended once can be appended again"
                copy._followed.append(self._followed[number])
                copy.keys = self.keys[: self.ends[number + 1] - 1]
        return copy


class Lines:
    """All lines of one episode."""

    def __init__(self, chat: ChatFormat, spec: EpisodeSpec, task: TaskInfo):
        """``chat`` must take user messages in mid-conversation, see ``policy.retaining``."""
        self.all: list[Line] = []
        self.num_answers = 0
        self._chat = chat
        self._spec = spec
        self._task = task

    def find(self, request: ChatRequest) -> tuple[Line, TurnEvent | None]:
        """The line that the request continues, with its messages; and the turn of it that is over thereby.

        ``ValueError`` when the chat template does not take the messages.
        """
        shared = [(count, line) for line in self.all if (count := line.shares(request)) is not None]
        if not shared:
            return self._begin(request), None
        count, line = max(shared, key=lambda pair: pair[0])
        if count < len(line.answers) or not count:
            line = line.fork(self._open(line.opening), count)
            self.all.append(line)
        if not count:
            return line, None
        event = line.go_on(request)
        return (line, event) if event is not None else (self._begin(request), None)

    def answer(self, line: Line, sample: Sample, asked: Sequence[Message]) -> Answer:
        """Append what the model sampled."""
        number, self.num_answers = self.num_answers, self.num_answers + 1
        renderer, tokenizer = self._chat.renderer, self._chat.tokenizer
        parsed = renderer.parse_response(list(sample.token_ids), tools=list(line.tools) or None)
        stop = sample.finish_reason == "stop"
        text: str = tokenizer.decode(list(sample.token_ids[:-1] if stop else sample.token_ids))
        answer = Answer(number, tuple(asked), sample, read_reply(parsed, text, line.tools, number))
        line.add(answer)
        return answer

    def last_answers(self) -> list[Answer]:
        """The last answer of each line, the newest first."""
        last = [line.answers[-1] for line in self.all if line.answers]
        return sorted(last, key=lambda answer: answer.number, reverse=True)

    def _begin(self, request: ChatRequest) -> Line:
        line = Line(self._open(request), request)
        self.all.append(line)
        return line

    def _open(self, request: ChatRequest) -> Transcript:
        task = self._task.model_copy(update={"tools": list(request.tools)})
        try:
            return Transcript(self._chat, self._spec, task, (request.messages, request.tools))
        except (RenderError, *UNRENDERABLE) as error:
            raise ValueError(f"this chat template does not take these messages: {error!r}") from error


def _strings(value: Any) -> list[str]:
    """All texts in the arguments of a call."""
    if isinstance(value, str):
        return [value]
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [text for each in inner for text in _strings(each)]
