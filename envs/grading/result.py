"""What tests say: to the agent (``VisibleResult``), and to the learner (``Grade``)."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class VisibleResult:
    """Outcome of the visible tests; ``output`` is what the agent reads."""

    passed: bool
    output: str


@dataclass(frozen=True, slots=True)
class Grade:
    """Outcome of a whole attempt: ``reward`` is 1.0 when all that is hidden holds, else 0.0 or a script's number."""

    reward: float
    parts: dict[str, float] = field(default_factory=dict)
    """``tests``: the fraction of hidden cases that pass; ``forged``: 1.0 when the attempt was caught cheating."""
    said: str = field(default="", compare=False, repr=False)
    """What hidden tests that failed said, its end. For a task's author; no agent may see it."""
