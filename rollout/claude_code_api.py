"""Claude Code files for scripts: one state per turn, ready for ``replay_api``, and examples with their errors marked.

    ingester = ClaudeCodeIngester(max_history_tokens=30_000)
    states = list(ingester.ingest(Path("session.jsonl")))
    results = replay_trace(states, teachers, folder=Path("replay"), budget_usd=2.0)
    examples = claude_states_to_trace_examples(states)

A thin layer over ``hintloop.replay.ingest``, which reads every format; into a journal, use
``hintloop traces ingest`` and ``replay``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypedDict

from hintloop.replay.episode import Episode, Turn
from hintloop.replay.ingest.classify import MODEL, classify
from hintloop.replay.ingest.episodes import to_episode
from hintloop.replay.ingest.ingest import find_files, read_traces
from hintloop.replay.ingest.report import Refused, Report
from hintloop.replay.ingest.trace import ToolCall as RecordedCall
from hintloop.replay.ingest.trace import ToolResult, Trace
from hintloop.rollout.pairs import canonical_turn
from hintloop.rollout.recording import SYSTEM_PROMPT, CountTokens, Recording, cut_history, turn_of
from hintloop.rollout.replay_api import TraceState

__all__ = [
    "SYSTEM_PROMPT",
    "ClaudeCodeIngester",
    "ClaudeState",
    "IngestionStats",
    "TraceExample",
    "TraceTurn",
    "claude_states_to_trace_examples",
    "default_classify_error",
]

FORMAT = "claude_code"
_SIDECHAIN = "side-"
_SHELL = "bash"
OTHER = "runtime_error"
"""The kind of an error whose text names no other."""


def default_classify_error(text: str) -> str:
    """The kind of error that a tool's text tells of, by the names of ``hintloop.envs.errors``."""
    failure = classify(RecordedCall("", _SHELL, "{}", ToolResult(text, is_error=True)))
    return failure.kind if failure else OTHER


@dataclass(frozen=True, slots=True)
class ClaudeState(TraceState):
    """A state, with the failures of its calls that the model caused."""

    failed: Mapping[int, str] = field(default_factory=dict)
    """By index into ``messages``, of assistant messages: what the call gave."""
    failure: str | None = None
    """What the action itself gave, if it failed."""


@dataclass(slots=True)
class IngestionStats:
    """What an ingester has read so far."""

    files: int = 0
    files_refused: int = 0
    """Of those, files that nothing was taken from."""
    records: int = 0
    conversations: int = 0
    sidechains_skipped: int = 0
    """Conversations of sub-agents that were left out."""
    states: int = 0
    turns_without_call: int = 0
    parallel_turns: int = 0
    """Turns with several calls: the state's action, and what is further in it."""
    histories_cut: int = 0
    histories_too_long: int = 0
    """Turns left out, as not even the end of their history fits."""
    skipped: Counter[str] = field(default_factory=Counter)
    """Records that are damaged or of no known kind, by reason."""
    secrets: Counter[str] = field(default_factory=Counter)
    """Secrets that were replaced, by kind."""


class ClaudeCodeIngester:
    """Reads Claude Code files; ``stats`` adds up over all of them."""

    def __init__(
        self,
        *,
        skip_sidechain: bool = True,
        system_prompt: str | None = SYSTEM_PROMPT,
        max_history_tokens: int | None = None,
        count_tokens: CountTokens | None = None,
        keep_secrets: bool = False,
    ) -> None:
        """``skip_sidechain`` leaves out sub-agents, which often hold most of the errors.

        ``system_prompt`` opens the messages, as recordings have none; None leaves it away. A history has at most
        ``max_history_tokens`` as ``count_tokens`` counts them (by default, four characters are one): its opening
        and its end. ``keep_secrets`` leaves keys and passwords in the texts.
        """
        self.stats = IngestionStats()
        self._skip_sidechain = skip_sidechain
        self._system_prompt = system_prompt
        self._max_history_tokens = max_history_tokens
        self._count_tokens = count_tokens
        self._keep_secrets = keep_secrets

    def ingest(self, path: Path | str) -> Iterator[ClaudeState]:
        """The states of a file, or of all files in a folder, turn by turn; one for each turn with a call.

        ``Refused`` (a ``ValueError``) for a file that is of another format or too damaged, ``OSError``. In a folder,
        such files are passed over.
        """
        found = Path(path)
        for file in find_files([found]):
            try:
                yield from self._file(file)
            except Refused:
                self.stats.files_refused += 1
                if not found.is_dir():
                    raise

    def _file(self, file: Path) -> Iterator[ClaudeState]:
        report, seen = Report(path=str(file)), set[bytes]()
        try:
            for trace in read_traces(file, report, keep_secrets=self._keep_secrets):
                if trace.source != FORMAT:
                    raise Refused(f"{file} is a trace of {trace.source}, not of Claude Code")
                self.stats.conversations += 1
                if self._skip_sidechain and trace.branch.startswith(_SIDECHAIN):
                    self.stats.sidechains_skipped += 1
                else:
                    yield from self._states(trace, to_episode(trace, seen, report))
        finally:
            self.stats.files += 1
            self.stats.records += report.read
            self.stats.skipped.update(report.skipped)
            self.stats.secrets.update(report.secrets)

    def _states(self, trace: Trace, episode: Episode) -> Iterator[ClaudeState]:
        recording = Recording(episode, system_prompt=self._system_prompt)
        copied = [message.copied for message in trace.messages if message.role == "assistant"]
        turns = [number for number, turn in enumerate(episode.turns) if turn.role == "assistant"]
        for number, known in zip(turns, copied, strict=True):
            if not known:  # else it was a state of an earlier conversation
                yield from self._state(recording, number)

    def _state(self, recording: Recording, number: int) -> Iterator[ClaudeState]:
        calls = recording.calls(number)
        if not calls:
            self.stats.turns_without_call += 1
            return
        whole = recording.messages(number)
        messages = cut_history(whole, self._max_history_tokens, self._count_tokens)
        if messages is None:
            self.stats.histories_too_long += 1
            return
        self.stats.states += 1
        self.stats.parallel_turns += len(calls) > 1
        self.stats.histories_cut += len(messages) < len(whole)
        turns = recording.episode.turns
        before = {
            index: turns[at] for index, each in enumerate(messages) if (at := turn_of(each)) is not None
        }
        yield ClaudeState(
            messages=messages,
            tools=recording.tools,
            action=calls[0],
            further=calls[1:],
            failed={index: gave for index, turn in before.items() if (gave := _failure(turn)) is not None},
            failure=_failure(turns[number]),
        )


class TraceTurn(TypedDict):
    """One message of an example."""

    role: str
    content: str
    """Its text; calls are lines of the tool's name and its arguments as JSON."""
    tool_error: str | None
    """Kind of the error that a hint is for, at the turn that the hint goes before."""


class TraceExample(TypedDict):
    """A state with the action taken in it as the last turn."""

    state_id: str
    turns: list[TraceTurn]


def claude_states_to_trace_examples(
    states: Iterable[TraceState],
    *,
    classify_error: Callable[[str], str] = default_classify_error,
    site: Literal["failing", "recovery"] = "failing",
) -> list[TraceExample]:
    """An example for each state, with the errors that the model caused marked.

    ``site`` is where: at the turn whose call failed, or at the next one, which answers the error. Only a
    ``ClaudeState`` knows of errors.
    """
    return [_example(state, classify_error, recovery=site == "recovery") for state in states]


def _example(state: TraceState, classify_error: Callable[[str], str], *, recovery: bool) -> TraceExample:
    turns = [TraceTurn(role=m["role"], content=_content(m), tool_error=None) for m in state.messages]
    turns.append(TraceTurn(role="assistant", content=canonical_turn(state.calls), tool_error=None))
    failed = dict(state.failed) if isinstance(state, ClaudeState) else {}
    if isinstance(state, ClaudeState) and state.failure is not None:
        failed[len(turns) - 1] = state.failure
    marked = [index for index, turn in enumerate(turns) if turn["role"] == "assistant"]
    for index, text in failed.items():
        at = next((other for other in marked if other > index), None) if recovery else index
        if at is not None:
            turns[at]["tool_error"] = classify_error(text)
    return TraceExample(state_id=state.state_id, turns=turns)


def _content(message: Mapping[str, Any]) -> str:
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    return "\n".join(filter(None, [message["content"], *(f"{c['name']} {c['arguments']}" for c in calls)]))


def _failure(turn: Turn) -> str | None:
    """What a turn's call gave, where it failed by the model's own doing."""
    return (turn.error_message or "") if turn.error_cause == MODEL else None
