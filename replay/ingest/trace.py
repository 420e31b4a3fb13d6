"""A recorded conversation in one form, whatever tool recorded it.

Nothing here is guessed: what a recording does not say is None or empty.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hintloop.replay.episode import Outcome


@dataclass(frozen=True, slots=True)
class Failure:
    """What went wrong: kind and cause carry the names of the live tool errors."""

    kind: str
    cause: str
    message: str


@dataclass(frozen=True, slots=True)
class Grade:
    """How a run ended, where the recording says so."""

    outcome: Outcome
    reward: float | None
    """None exactly when the outcome is ``infra_error``."""
    parts: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What a tool call gave."""

    text: str
    is_error: bool | None = None
    """The recording's own flag; None when it has none. Neither value alone says whose doing an error is."""
    exit_code: int | None = None
    seconds: float = 0.0
    """Wall time, where it was recorded."""
    refused: bool = False
    """A person, a hook or a policy did not let the call run, or stopped it."""
    failure: Failure | None = None
    """The recording's own verdict."""
    judged: bool = False
    """The recording's verdict stands, also where it is that nothing failed; else it is told from the rest."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One tool call with its result."""

    call_id: str
    name: str
    arguments: str
    """JSON text: an object, or anything else where the model wrote something else."""
    result: ToolResult | None = None
    """None when none was recorded."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens that the provider counted for one message."""

    input_tokens: int = 0
    """Cached ones included."""
    output_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Message:
    """One message; the results of an assistant message's calls belong to it, in whatever order they came."""

    role: str
    """``system``, ``user`` or ``assistant``; ``tool`` for a result whose call could not be read."""
    text: str
    calls: tuple[ToolCall, ...] = ()
    """Of an assistant message; parallel calls are one message."""
    thinking: str = ""
    timestamp: float | None = None
    """Unix time, seconds."""
    model: str = ""
    usage: Usage | None = None
    copied: bool = False
    """Context only: it was part of an earlier trace, so an error in it is counted there."""
    failure: Failure | None = None
    """What was wrong with the message itself, such as a call in it that could not be read."""


@dataclass(frozen=True, slots=True)
class Trace:
    """What one model saw and did, from the beginning of its context to its last message."""

    source: str
    """Name of the format."""
    session: str
    """The recording tool's own id of the run."""
    branch: str
    """Which of the conversations in that run: a sub-agent, a rewound prompt, the context after a compaction."""
    messages: tuple[Message, ...]
    versions: tuple[str, ...] = ()
    """Versions of the recording tool, in the order of their appearance."""
    grade: Grade | None = None
    """None where nobody graded the run."""

    @property
    def model(self) -> str:
        """The model of most assistant messages; empty when no message names one."""
        names = [message.model for message in self.messages if message.model]
        return max(dict.fromkeys(names), key=names.count, default="")

    @property
    def ended_at(self) -> float | None:
        """Newest time stamp, Unix time in seconds."""
        return max((m.timestamp for m in self.messages if m.timestamp is not None), default=None)
