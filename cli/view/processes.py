"""Who does what and who waits for whom: the processes of a run, as they describe themselves."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from hintloop.cli.display import duration
from hintloop.cli.view.charts import stacked
from hintloop.cli.view.data import RunData, as_number
from hintloop.cli.view.text import number, percent

SILENT_S = 60.0
"""A process that has said nothing for so long, and has not ended, is marked."""
MAX_STATE_CHARS = 400
_ENDED = ("ended", "finished", "stopped")
_WAITING = (
    ("in_flight", "episodes in flight"),
    ("waiting_for_environment", "of them waiting for the environment server"),
    ("groups_held", "groups held back for older ones"),
)


@dataclass(frozen=True, slots=True)
class Part:
    """One process of the run, as it describes itself."""

    title: str
    state: str
    mood: str
    """``good``, ``waits``, ``bad`` or ``idle``: a class of the style sheet."""
    since: str
    facts: tuple[str, ...]
    shares: tuple[tuple[str, float, int], ...] = ()
    """Where its time went: words, seconds, colour."""

    @property
    def bar(self) -> Markup:
        """The shares as a picture; empty when nothing was spent."""
        return (
            stacked([(seconds, colour) for _, seconds, colour in self.shares]) if self.spent else Markup("")
        )

    @property
    def spent(self) -> float:
        """All seconds together."""
        return sum(seconds for _, seconds, _ in self.shares)


def badge(data: RunData) -> tuple[str, str]:
    """How the run is doing, in a word, and the mood of that word."""
    states = [str(said.get("state", "")) for said in data.status.values() if said]
    if not states:
        return "not started", "idle"
    if any(state.startswith("failed") for state in states):
        return "failed", "bad"
    if all(state.startswith(_ENDED) for state in states):
        stopped = any(state.startswith("stopped") or state.endswith("signal") for state in states)
        return ("stopped", "waits") if stopped else ("finished", "idle")
    silent = min(_silent(said) for said in data.status.values() if said)
    return ("live", "good") if silent < SILENT_S else (f"silent for {duration(silent)}", "bad")


def processes(data: RunData) -> list[Part]:
    """Rollout and learner."""
    rollout, learner, steps = data.status["rollout"], data.status["learner"], data.steps
    waited = as_number(rollout.get("waited_s")) or 0.0
    alive = max(last_word(rollout) - (as_number(rollout.get("started_at")) or last_word(rollout)), waited)
    facts = [f"plays version {number(as_number(rollout.get('version')))}"]
    for key, words in _WAITING:
        if count := as_number(rollout.get(key)):
            facts.append(f"{number(count)} {words}")
    return [
        _part(
            "Rollout: plays episodes",
            rollout,
            tuple(facts),
            (("playing and evaluating", alive - waited, 1), ("waiting for the learner", waited, 2)),
        ),
        _part(
            "Learner: trains and publishes",
            learner,
            (f"has published version {number(as_number(learner.get('version')))}",),
            (
                ("training", steps.total("seconds_training"), 1),
                ("waiting for episodes", steps.total("seconds_waiting"), 2),
                ("publishing", steps.total("seconds_publishing"), 3),
            ),
        ),
    ]


def _part(
    title: str, said: Mapping[str, Any], facts: tuple[str, ...], shares: tuple[tuple[str, float, int], ...]
) -> Part:
    if not said:
        return Part(title, "has not said anything yet", "idle", "", (), shares)
    state, silent = str(said.get("state", "")), _silent(said)
    ended = state.startswith((*_ENDED, "failed"))
    since = f"for {duration(max(time.time() - (as_number(said.get('since')) or time.time()), 0.0))}"
    if ended:
        since, mood = f"{duration(silent)} ago", "bad" if state.startswith("failed") else "idle"
    elif silent > SILENT_S:
        since, mood = f"silent for {duration(silent)}: is it alive?", "bad"
    else:
        mood = "waits" if "wait" in state.rpartition("; ")[2] else "good"
    return Part(title, state[:MAX_STATE_CHARS], mood, since, facts, shares)


def verdict(parts: Sequence[Part]) -> str:
    """Who waits for whom, in a sentence; empty before anything can be said. Takes what ``processes`` gives."""
    rollout, learner = parts
    if not rollout.spent or not learner.spent:
        return ""
    idle, hungry = (part.shares[1][1] / part.spent for part in (rollout, learner))
    pace = "The learner sets the pace" if idle > hungry else "The rollout side sets the pace"
    return (
        f"{pace}: the rollout side has waited {percent(idle, 0)} of its time for the learner, "
        f"the learner {percent(hungry, 0)} of its time for episodes."
    )


def lag(data: RunData) -> float | None:
    """Versions that the rollout side is behind the learner right now; None when one has not said."""
    versions = [as_number(data.status[part].get("version")) for part in ("learner", "rollout")]
    learner, rollout = versions
    return None if learner is None or rollout is None else max(learner - rollout, 0.0)


def last_word(said: Mapping[str, Any]) -> float:
    """When a process last said something, Unix time; 0 for never."""
    return as_number(said.get("updated", said.get("time"))) or 0.0


def _silent(said: Mapping[str, Any]) -> float:
    return max(time.time() - last_word(said), 0.0)
