"""What travels over the wire between the agent and the coding environment."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from hintloop.envs._openenv import Action, Observation, State
from hintloop.envs.errors import ToolError


class Trial(BaseModel):
    """Marks a call that is not the agent's: it is tried in a copy of an earlier state, and changes nothing.

    The result says what it gave, and is ``done`` exactly when the episode is over. What cannot be tried, as the state
    was not kept, is refused.
    """

    model_config = ConfigDict(frozen=True)

    before: int
    """Number of the step, from 1, whose call had ``keep``: the state before that is meant."""
    then: list[dict[str, Any]] = Field(default_factory=list)
    """Further calls (``name``, ``arguments``, ``malformed``), made one after the other in the same copy; the first
    error is the error of all, a failing test only where nothing else failed."""
    tests: bool = False
    """Run the visible tests at the end; the share that passes is ``reward_parts["visible"]``, if there are any."""


class ToolCall(Action):
    """One call of a tool by the agent."""

    name: str = ""
    arguments: dict[str, Any] = Field(default_factory=dict)
    malformed: str | None = None
    """What the agent wrote, when no call could be parsed from it; ``name`` and ``arguments`` are ignored then."""
    keep: Literal["no", "on_error", "always"] = "no"
    """Whether the state before this call stays at hand for trials: if the call is an error of the agent, or always.
    An episode keeps few; see ``hintloop.envs.trials``."""
    trial: Trial | None = None


class TaskInfo(BaseModel):
    """What the agent may know of its task; sent once, with the result of ``reset``."""

    model_config = ConfigDict(frozen=True)

    task_id: str
    instruction: str
    files: list[str]
    tools: list[dict[str, Any]]
    """JSON-schema function specs: ``{"name", "description", "parameters"}``."""
    tool_prompt: str
    """One line that names the tools with their parameters, for models too small for the full schemas."""
    max_turns: int
    max_step_seconds: float = 0.0
    """How long the server may take for one step: the last one grades."""


class ToolResult(Observation):
    """What a tool call gave. ``reward`` stays None until the episode is graded, and after infrastructure failure."""

    output: str = ""
    """Text for the agent; an error starts with ``error: ``."""
    error: ToolError | None = None
    exit_code: int | None = None
    seconds: float = 0.0
    reward_parts: dict[str, float] = Field(default_factory=dict)
    task: TaskInfo | None = None


class CodingState(State):
    """State of one episode on the server (inherits ``episode_id`` and ``step_count``)."""

    task_id: str | None = None
    isolation: str = "none"
    """What the sandbox really enforces, e.g. ``user+pid+mount+net``."""
