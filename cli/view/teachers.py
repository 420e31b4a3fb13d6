"""What the teachers were asked, what it brought and what it cost, as the rollout process counts it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hintloop.cli.view.data import as_number
from hintloop.cli.view.text import dollars, name, number

MAX_REASONS = 30
_COUNTS = {
    "asked_turns": "turns asked about",
    "answers": "answers",
    "cached": "of them known from before",
    "pairs": "preference pairs",
    "same": "teachers agreed with the agent",
    "disagreed": "teachers did not agree",
    "over_budget": "not asked, for the budget",
    "late": "answers too late",
}
_REASONS = {
    "unrenderable": "not trained on",
    "unverified": "not verified",
    "errors": "failed answers of",
}
_MONEY = {
    "spent_usd": "spent",
    "reserved_usd": "set aside for open questions",
    "left_usd": "left of the budget",
}


@dataclass(frozen=True, slots=True)
class Teachers:
    """The account of all teachers together."""

    asked: bool
    """Somebody is asked in this run."""
    spent: float | None
    """US dollars: of the whole run where a ledger is kept, else of the running rollout process."""
    answers: float | None
    rows: tuple[tuple[str, str], ...]
    """Words and numbers."""
    reasons: tuple[tuple[str, str, str, str], ...]
    """Why turns were asked about: reason, questions, pairs, cost."""


def teachers(rollout: Mapping[str, Any]) -> Teachers:
    """Read the account out of the status of the rollout process."""
    said = rollout.get("teachers")
    if not isinstance(said, dict):
        return Teachers(False, None, None, (), ())
    ledger = _dict(said, "ledger")
    money = ledger or {"spent_usd": said.get("cost_usd")}
    return Teachers(
        asked=True,
        spent=as_number(money.get("spent_usd")),
        answers=as_number(said.get("answers")),
        rows=(*_rows(said), *_amounts(money)),
        reasons=tuple(_reasons(said)),
    )


def _rows(said: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for key, words in _COUNTS.items():
        if key in said:
            yield words, number(as_number(said[key]))
    for key, words in _REASONS.items():
        for why, count in list(_dict(said, key).items())[:MAX_REASONS]:
            yield f"{words}: {name(why)}", number(as_number(count))


def _amounts(money: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for key, words in _MONEY.items():
        if (amount := as_number(money.get(key))) is not None:
            yield words, dollars(amount)


def _reasons(said: Mapping[str, Any]) -> Iterator[tuple[str, str, str, str]]:
    for reason, value in list(_dict(said, "by_reason").items())[:MAX_REASONS]:
        if isinstance(value, dict):
            questions, pairs, cost = (as_number(value.get(key)) for key in ("questions", "pairs", "cost_usd"))
            yield name(reason), number(questions), number(pairs), dollars(cost)


def _dict(said: Mapping[str, Any], key: str) -> dict[str, Any]:
    found = said.get(key)
    return found if isinstance(found, dict) else {}
