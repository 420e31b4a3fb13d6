"""The teachers of a run with everything that they share: the client, the ledger, the cache, the counts."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from hintloop.rollout.answer_cache import AnswerCache
from hintloop.rollout.asking import AskRule, PairCounts, Uncertainty
from hintloop.rollout.config import TeachersConfig
from hintloop.rollout.ledger import Ledger
from hintloop.rollout.pairs import PairMaker
from hintloop.rollout.teachers import Teacher


@dataclass(frozen=True, slots=True)
class Asking:
    """The teachers, and when to ask them."""

    teachers: Sequence[Teacher]
    rule: AskRule
    counts: PairCounts = field(default_factory=PairCounts)
    uncertainty: Uncertainty = field(default_factory=Uncertainty)
    ledger: Ledger | None = None
    cache: AnswerCache | None = None

    def maker(self, episode_id: str) -> PairMaker:
        """Who asks about the turns of one episode."""
        return PairMaker(episode_id, self.teachers, self.rule, self.counts, self.uncertainty)

    def snapshot(self) -> dict[str, Any]:
        """What was asked, what it brought and what it cost, as JSON data."""
        parts = {"ledger": self.ledger, "cache": self.cache}
        return self.counts.snapshot() | {
            name: part.snapshot() for name, part in parts.items() if part is not None
        }


async def open_asking(settings: TeachersConfig, run_dir: Path, stack: AsyncExitStack) -> Asking | None:
    """The teachers of a run, open as long as ``stack``; None when nobody is to be asked.

    Raises ``ValueError`` for a missing key, ``LedgerFailed`` for a ledger that cannot be written.
    """
    if not settings.teachers or not settings.max_asks_per_episode:
        return None
    client = await stack.enter_async_context(httpx.AsyncClient())
    cache = None
    if settings.cache_mb:
        cache = AnswerCache(run_dir / "cache" / "teachers", max_bytes=int(settings.cache_mb * 1e6))
    ledger = None
    if any(spec.usd_per_mtok_in or spec.usd_per_mtok_out for spec in settings.teachers):
        ledger = Ledger(
            run_dir / "teachers" / "ledger.jsonl",
            budget_usd=settings.budget_usd,
            episode_budget_usd=settings.episode_budget_usd,
        )
        stack.callback(ledger.close)
    teachers = [
        Teacher(
            spec,
            client,
            timeout_s=settings.timeout_s,
            attempts=settings.attempts,
            in_flight=settings.in_flight,
            ledger=ledger,
            cache=cache,
        )
        for spec in settings.teachers
    ]
    rule = AskRule(
        agree=settings.agree,
        ask_probability=settings.ask_probability,
        max_asks=settings.max_asks_per_episode,
        deadline_s=settings.deadline_s,
        ask=settings.ask,
        verify=settings.verify,
    )
    uncertainty = Uncertainty(quantile=settings.uncertain_quantile, nats=settings.uncertain_nats)
    return Asking(teachers, rule, uncertainty=uncertainty, ledger=ledger, cache=cache)
