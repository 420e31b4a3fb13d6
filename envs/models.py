"""What travels over the wire between the agent and the coding environment."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from hintloop.envs._openenv import Action, Observation, State
from hintloop.envs.errors import ToolError


class ToolCall(Action):
    """One call of a tool by the agent."""

    name: str = ""
    arguments: dict[str, Any] = Field(default_factory=dict)
    malformed: str | None = None
    """What the agent wrote, when no call could be parsed from it; ``name`` and ``arguments`` are ignored then."""


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
