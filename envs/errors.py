"""The tool-error taxonomy: what can go wrong when an agent calls a tool, and whose doing it is."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class Cause(StrEnum):
    """Whose doing an error is. Only ``model`` errors become hint sites."""

    MODEL = "model"
    INFRA = "infra"
    USER = "user"
    """The task or the person behind it: a test that fails because the bug is still there, a refused call."""


KINDS: dict[str, Cause] = {
    "tool_not_found": Cause.MODEL,
    "json_decode": Cause.MODEL,
    "type_error": Cause.MODEL,
    "command_not_found": Cause.MODEL,
    "file_not_found": Cause.MODEL,
    "permission_denied": Cause.MODEL,
    "syntax_error": Cause.MODEL,
    "edit_no_match": Cause.MODEL,
    "runtime_error": Cause.MODEL,
    "test_failure": Cause.USER,
    "timeout": Cause.MODEL,
    "output_capped": Cause.MODEL,
    "out_of_memory": Cause.MODEL,
    "connection_error": Cause.INFRA,
    "repeated_failure": Cause.MODEL,
}
"""Every known kind and its usual cause. Open: ``register_kind`` adds more."""


def register_kind(kind: str, cause: Cause) -> None:
    """Add a kind of tool error. ``ValueError`` when it is known already with another cause."""
    if KINDS.setdefault(kind, cause) is not cause:
        raise ValueError(f"error kind {kind!r} is registered already with cause {KINDS[kind]!s}")


class ToolError(BaseModel):
    """One failed tool call, as data."""

    model_config = ConfigDict(frozen=True)

    kind: str
    message: str
    """What the agent is told."""
    cause: Cause
    meta: dict[str, Any] = Field(default_factory=dict)
    """What a hint may use: e.g. ``name``, ``tools``, ``nearest``, ``line``, ``line_text``, ``missing``."""


def tool_error(kind: str, message: str, **meta: Any) -> ToolError:
    """A ``ToolError`` of a known kind with that kind's usual cause. ``KeyError`` for an unknown kind."""
    return ToolError(kind=kind, message=message, cause=KINDS[kind], meta=meta)
