"""Teachers on recorded states, for scripts: ask, keep what they agree on, save it for TRL's ``DPOTrainer``.

    states = [TraceState(messages=[...], tools=[...], action=ToolCall(name="bash", arguments={"command": "ls"}))]
    results = replay_trace(states, folder=Path("replay"), budget_usd=2.0)
    save_pairs(extract_dpo_pairs(states, results), Path("pairs.jsonl"))

The same teachers, ledger and agreement as in a run. What was answered stays in the folder, so a script that was
stopped goes on where it was, within the same budget.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx

from hintloop.envs.models import ToolCall
from hintloop.replay.normalize import Pair
from hintloop.rollout.answer_cache import AnswerCache
from hintloop.rollout.config import TeacherSpec, check_prices
from hintloop.rollout.ledger import Ledger
from hintloop.rollout.pairs import agree, canonical_turn
from hintloop.rollout.teachers import Bill, Teacher, TeacherAnswer

__all__ = [
    "DEFAULT_TEACHERS",
    "DPOPair",
    "TeacherCallResult",
    "TeacherSpec",
    "ToolCall",
    "TraceState",
    "extract_dpo_pairs",
    "replay_trace",
    "save_pairs",
]

KEPT_BYTES = 2**30
"""Answers kept in a folder."""


def _on_openrouter(name: str, model: str, usd_in: float, usd_out: float) -> TeacherSpec:
    return TeacherSpec(
        name=name,
        model=model,
        usd_per_mtok_in=usd_in,
        usd_per_mtok_out=usd_out,
    )


DEFAULT_TEACHERS = (
    _on_openrouter("claude", "anthropic/claude-sonnet-4.5", 6.0, 22.5),
    _on_openrouter("gpt", "openai/gpt-5", 1.25, 10.0),
    _on_openrouter("gemini", "google/gemini-2.5-pro", 2.5, 15.0),
)
"""Three families, at their prices for long prompts; prices change, and a budget is only as good as they are."""


@dataclass(frozen=True, slots=True)
class TraceState:
    """One recorded state: what the agent had before it, and what it did."""

    messages: Sequence[dict[str, Any]]
    """The transcript, in the OpenAI chat form."""
    tools: Sequence[dict[str, Any]]
    """Plain function specs: ``{"name", "description", "parameters"}``."""
    action: ToolCall
    further: Sequence[ToolCall] = ()
    """What else it called in the same turn."""

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        """The whole turn."""
        return (self.action, *self.further)

    @property
    def state_id(self) -> str:
        """A digest of all of it."""
        content = [list(self.messages), list(self.tools), canonical_turn(self.calls)]
        return sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class TeacherCallResult:
    """What one teacher said of one state."""

    state_id: str
    answer: TeacherAnswer


@dataclass(frozen=True, slots=True)
class DPOPair:
    """An action that teachers agree on, and what the agent did instead: each the calls of one turn."""

    state_id: str
    prompt: Sequence[dict[str, Any]]
    tools: Sequence[dict[str, Any]]
    chosen: Sequence[ToolCall]
    rejected: Sequence[ToolCall]
    asked: int
    agreed: int
    teachers: tuple[str, ...] = field(default=())
    cost_usd: float = 0.0
    """What the answers were booked with; those that came from the folder cost nothing again."""

    def row(self) -> dict[str, Any]:
        """As TRL's preference format has it: conversational, with tools.

        What differs in its keys from row to row is JSON text, so that Arrow does not fill in what is missing.
        """
        return {
            "prompt": list(self.prompt),
            "chosen": [_message(self.chosen)],
            "rejected": [_message(self.rejected)],
            "tools": json.dumps([{"type": "function", "function": spec} for spec in self.tools]),
            "teachers": list(self.teachers),
            "asked": self.asked,
            "agreed": self.agreed,
            "cost_usd": self.cost_usd,
            "state_id": self.state_id,
        }


def replay_trace(
    states: Sequence[TraceState],
    teachers: Sequence[TeacherSpec] = DEFAULT_TEACHERS,
    *,
    folder: Path,
    budget_usd: float | None = None,
    timeout_s: float = 60.0,
    attempts: int = 3,
    in_flight: int = 8,
) -> list[TeacherCallResult]:
    """Ask every teacher about every state; in the order of ``states``, then of ``teachers``. Blocks.

    ``folder`` holds answers and ledger; ``budget_usd`` is for all that is ever asked in it. A question that was
    answered there is not asked again. What goes wrong with a teacher is in its result. ``ValueError`` for a missing
    key or price, ``LedgerFailed`` when another process works in the folder or it cannot be written.
    """

    async def ask_all() -> list[TeacherCallResult]:
        cache = AnswerCache(folder / "answers", max_bytes=KEPT_BYTES)
        settings: dict[str, Any] = {"timeout_s": timeout_s, "attempts": attempts, "in_flight": in_flight}
        room = asyncio.Semaphore(in_flight * max(len(teachers), 1))

        async def ask(state: TraceState, teacher: Teacher) -> TeacherCallResult:
            async with room:  # before the time of the question begins
                answer = await teacher.ask(state.messages, state.tools, Bill(state.state_id))
            return TeacherCallResult(state.state_id, answer)

        async with httpx.AsyncClient() as client:
            made = [Teacher(spec, client, ledger=ledger, cache=cache, **settings) for spec in teachers]
            return await asyncio.gather(*(ask(state, teacher) for state in states for teacher in made))

    if budget_usd is not None:
        check_prices(teachers)
    ledger = Ledger(folder / "ledger.jsonl", budget_usd=budget_usd)
    try:
        return asyncio.run(ask_all())
    finally:
        ledger.close()


def extract_dpo_pairs(
    states: Sequence[TraceState], results: Sequence[TeacherCallResult], *, agreeing: int = 2
) -> list[DPOPair]:
    """A pair for each state where at least ``agreeing`` teachers gave the same action, and the agent another.

    A state that is there twice gives one pair, and a teacher that was asked twice counts once.
    """
    answers: dict[str, list[TeacherAnswer]] = {}
    for result in results:
        answers.setdefault(result.state_id, []).append(result.answer)
    pairs = []
    for state_id, state in {state.state_id: state for state in states}.items():
        given = answers.get(state_id, [])
        agreed = agree(given, agreeing)
        if agreed is None or canonical_turn(agreed.calls) == canonical_turn(state.calls):
            continue
        pairs.append(
            DPOPair(
                state_id=state_id,
                prompt=state.messages,
                tools=state.tools,
                chosen=agreed.calls,
                rejected=state.calls,
                asked=len({answer.teacher for answer in given}),
                agreed=len(agreed.teachers),
                teachers=agreed.teachers,
                cost_usd=sum(answer.cost_usd for answer in given),
            )
        )
    return pairs


def save_pairs(pairs: Sequence[Pair], path: Path) -> int:
    """Write the pairs (also normalised ones) as JSON lines, all or nothing; their number."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with part.open("w", encoding="utf-8") as file:
            for pair in pairs:
                file.write(json.dumps(pair.row()) + "\n")
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    return len(pairs)


def _message(calls: Sequence[ToolCall]) -> dict[str, Any]:
    """What the model writes to make the calls; what could not be parsed as one is plain text."""
    broken = next((call.malformed for call in calls if call.malformed is not None), None)
    if broken is not None:
        return {"role": "assistant", "content": broken}
    functions = [{"name": call.name, "arguments": json.dumps(call.arguments)} for call in calls]
    made = [{"type": "function", "function": function} for function in functions]
    return {"role": "assistant", "content": "", "tool_calls": made}
