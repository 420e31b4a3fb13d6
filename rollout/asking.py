"""When it is worth asking the teachers about a turn, and what asking for each reason brought."""

from __future__ import annotations

import bisect
import math
import random
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, Literal

WINDOW = 512
"""Turns that an uncertain one is compared with."""
WARM_UP = 32
"""With fewer turns seen, none counts as uncertain by its quantile."""


class Reason(StrEnum):
    """Why a turn is asked about; the first that applies."""

    ERROR = "error"
    """The agent made a tool error in it."""
    UNCERTAIN = "uncertain"
    """The agent was unsure when it sampled the turn."""
    ALL = "all"
    """Every turn is asked about."""
    CHANCE = "chance"


@dataclass(frozen=True, slots=True)
class AskRule:
    """When to ask, how many must agree, and what an agreed action must do."""

    agree: int
    """Teachers that must give the same action."""
    ask_probability: float
    """For a turn that there is no other reason for."""
    max_asks: int
    """Turns asked about per episode at most."""
    deadline_s: float
    """How long answers may come in after the end of the episode, seconds."""
    ask: Literal["errors", "uncertain", "all"] = "errors"
    verify: Literal["none", "no_error", "better_tests"] = "none"


class Uncertainty:
    """Tells turns that were sampled with high entropy: by ``nats`` per token, or (None) by ``quantile``.

    The mean negative log-probability of the sampled tokens is an unbiased estimate of the mean entropy.
    """

    def __init__(self, *, quantile: float = 0.9, nats: float | None = None):
        self._quantile = quantile
        self._nats = nats
        self._recent: deque[float] = deque()
        self._sorted: list[float] = []

    def high(self, logprobs: Sequence[float]) -> bool:
        """Whether a turn of these log-probabilities is uncertain; it is compared with those before it."""
        value = -math.fsum(logprobs) / max(len(logprobs), 1)
        if not math.isfinite(value):
            return False
        if self._nats is not None:
            return value > self._nats
        count = len(self._sorted)
        high = count >= WARM_UP and value > self._sorted[math.ceil(self._quantile * (count - 1))]
        self._note(value)
        return high

    def _note(self, value: float) -> None:
        if len(self._recent) == WINDOW:
            self._sorted.pop(bisect.bisect_left(self._sorted, self._recent.popleft()))
        self._recent.append(value)
        bisect.insort(self._sorted, value)


def planned(
    rule: AskRule, uncertainty: Uncertainty, episode_id: str, turn: int, logprobs: Sequence[float]
) -> Reason | None:
    """The reason to ask about a turn that can be told before it is executed. Call it once per turn."""
    if rule.ask == "all":
        return Reason.ALL
    if rule.ask == "uncertain" and uncertainty.high(logprobs):
        return Reason.UNCERTAIN
    chance = random.Random(f"ask:{episode_id}:{turn}").random() < rule.ask_probability
    return Reason.CHANCE if chance else None


@dataclass(slots=True)
class Value:
    """What asking for one reason cost and brought."""

    questions: int = 0
    """Turns asked about."""
    pairs: int = 0
    cost_usd: float = 0.0

    def snapshot(self) -> dict[str, Any]:
        """With the pairs per question and per dollar; None without any."""
        return {
            **asdict(self),
            "pairs_per_question": round(self.pairs / self.questions, 4) if self.questions else None,
            "pairs_per_usd": per_usd(self.pairs, self.cost_usd),
        }


def per_usd(pairs: int, usd: float | None) -> float | None:
    """Pairs per dollar; None where nothing was spent."""
    return round(pairs / usd, 4) if usd else None


@dataclass(slots=True)
class PairCounts:
    """What became of the questions, summed over all episodes of this process."""

    asked_turns: int = 0
    answers: int = 0
    cached: int = 0
    """Answers that cost nothing, as they were given before."""
    errors: Counter[str] = field(default_factory=Counter)
    """Answers that were none, by teacher."""
    over_budget: int = 0
    """Of those: not asked, for what it might have cost."""
    late: int = 0
    """Turns whose answers did not come before the deadline, or before their episode was lost."""
    disagreed: int = 0
    same: int = 0
    """Turns where the teachers agreed with the agent."""
    unrenderable: Counter[str] = field(default_factory=Counter)
    """Agreed actions that the model's chat template cannot write, by reason."""
    unverified: Counter[str] = field(default_factory=Counter)
    """Agreed actions that did not do what they must, or could not be tried, by what was wrong."""
    pairs: int = 0
    cost_usd: float = 0.0
    by_reason: dict[Reason, Value] = field(default_factory=dict)

    def value(self, reason: Reason) -> Value:
        """The account of a reason."""
        return self.by_reason.setdefault(reason, Value())

    def snapshot(self) -> dict[str, Any]:
        """Everything as JSON data."""
        return {
            **asdict(self),
            "pairs_per_usd": per_usd(self.pairs, self.cost_usd),
            "errors": dict(self.errors),  # asdict does not know how to copy a Counter
            "unrenderable": dict(self.unrenderable),
            "unverified": dict(self.unverified),
            "by_reason": {reason.value: value.snapshot() for reason, value in self.by_reason.items()},
        }
