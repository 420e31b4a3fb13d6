"""Whose failure it was: one class for whatever goes wrong at an await, so that failures can be counted by it."""

from __future__ import annotations

from enum import StrEnum

import httpx

from hintloop.agent.conversation import RenderError
from hintloop.agent.engine import EngineError
from hintloop.agent.episode import EpisodeLost, TaskUnfit
from hintloop.envs.client import EnvironmentLost, Refused
from hintloop.rollout.weights import WeightsRefused


class Part(StrEnum):
    """A part of the loop that can fail."""

    MODEL = "model"
    """Its chat template or tokenizer cannot express what has to be said."""
    AGENT = "agent"
    """An agent program."""
    TASK = "task"
    """It cannot be opened, does not fit, or is not graded."""
    SANDBOX = "sandbox"
    ENVIRONMENT = "environment"
    """The environment server."""
    ENGINE = "engine"
    TEACHER = "teacher"
    STORAGE = "storage"
    """The journal, the weights or the run's folder."""
    BUG = "bug"
    """None of the others; the log has the traceback."""


class Overdue(Exception):
    """A wait reached its deadline."""

    def __init__(self, part: Part, text: str):
        """``part``: who was waited for."""
        super().__init__(text)
        self.part = part


_REASONS = {**{str(part): part for part in Part}, "ungraded": Part.TASK}
"""By the reason of an ``EpisodeLost``."""


def part_of(error: BaseException) -> Part:
    """The class of an error."""
    match error:
        case Overdue():
            return error.part
        case EpisodeLost():
            return _REASONS.get(error.reason, Part.BUG)
        case EnvironmentLost():
            return Part.ENVIRONMENT
        case Refused() | TaskUnfit():
            return Part.TASK
        case EngineError() | WeightsRefused():
            return Part.ENGINE
        case RenderError():
            return Part.MODEL
        case httpx.HTTPError():
            return Part.TEACHER
        case OSError():
            return Part.STORAGE
        case _:
            return Part.BUG


def reason_of(error: BaseException) -> str:
    """A word to count a lost episode by: its class, more exactly where that is known."""
    part = part_of(error)
    if isinstance(error, EpisodeLost):
        return error.reason
    return f"{part}:{type(error).__name__}" if part is Part.BUG else str(part)
