"""The teachers of a run with everything that they share: the client, the ledger, the cache, the counts."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from hintloop.agent.engine import Sample
from hintloop.agent.episode import Environment, Keep, TurnEvent
from hintloop.envs.models import ToolCall
from hintloop.replay.episode import Episode
from hintloop.rollout.answer_cache import AnswerCache
from hintloop.rollout.asking import AskRule, PairCounts, Uncertainty
from hintloop.rollout.config import TeachersConfig
from hintloop.rollout.hint_writer import HintWriter, WriterCounts
from hintloop.rollout.ledger import Ledger, LedgerFailed
from hintloop.rollout.offload import aside
from hintloop.rollout.pairs import PairMaker
from hintloop.rollout.teachers import Teacher

OPEN_S = 60.0
"""What opening the ledger may take."""
_TRY = re.compile(r"\.\d+$")


@dataclass(frozen=True, slots=True)
class Watch:
    """What is asked about one episode while it is played."""

    pairs: PairMaker
    hints: HintWriter | None = None

    def on_turn(self, event: TurnEvent) -> None:
        """Ask about this turn, or not; returns at once."""
        self.pairs.on_turn(event)
        if self.hints is not None:
            self.hints.on_turn(event)

    def keep(self, turn: int, sample: Sample, calls: Sequence[ToolCall]) -> Keep:
        """Whether the state before the turn has to stay at hand."""
        return self.pairs.keep(turn, sample, calls)

    async def verify_in(self, env: Environment) -> None:
        """Try what the teachers agreed on, while the environment of the episode is there."""
        await self.pairs.verify_in(env)

    async def finish(self, episode: Episode) -> Episode:
        """The episode with all that was answered in time."""
        if self.hints is None:
            return replace(episode, pairs=await self.pairs.pairs())
        pairs, sites = await asyncio.gather(self.pairs.pairs(), self.hints.rewrite(episode.hint_sites))
        return replace(episode, pairs=pairs, hint_sites=sites)

    async def cancel(self) -> None:
        """Stop asking."""
        await self.pairs.cancel()
        if self.hints is not None:
            await self.hints.cancel()


@dataclass(frozen=True, slots=True)
class Asking:
    """The teachers, and when to ask them."""

    teachers: Sequence[Teacher]
    rule: AskRule
    counts: PairCounts = field(default_factory=PairCounts)
    uncertainty: Uncertainty = field(default_factory=Uncertainty)
    writer: Teacher | None = None
    """Who writes hints."""
    written: WriterCounts = field(default_factory=WriterCounts)
    ledger: Ledger | None = None
    cache: AnswerCache | None = None

    def watch(self, episode_id: str, hint_role: str) -> Watch:
        """Who asks about the turns of one episode."""
        place = place_of(episode_id)
        pairs = PairMaker(episode_id, self.teachers, self.rule, self.counts, self.uncertainty, paid_by=place)
        if self.writer is None:
            return Watch(pairs)
        writer = HintWriter(
            place,
            self.writer,
            self.written,
            role=hint_role,
            max_asks=self.rule.max_asks,
            deadline_s=self.rule.deadline_s,
        )
        return Watch(pairs, writer)

    def snapshot(self) -> dict[str, Any]:
        """What was asked, what it brought and what it cost, as JSON data."""
        told = self.counts.snapshot()
        if self.writer is not None:
            told["hint_writer"] = asdict(self.written)
        if self.ledger is not None:
            told["ledger"] = self.ledger.snapshot()
        if self.cache is not None:
            told["cache"] = self.cache.snapshot()
        return told


async def open_asking(
    settings: TeachersConfig, hint_writer: str | None, run_dir: Path, stack: AsyncExitStack
) -> Asking | None:
    """The teachers of a run, open as long as ``stack``; None when nobody is to be asked.

    Raises ``ValueError`` for a missing key or a hint writer that is no teacher, ``LedgerFailed`` for a ledger that
    cannot be written.
    """
    names = [spec.name for spec in settings.teachers]
    if hint_writer is not None and hint_writer not in names:
        raise ValueError(
            f"rollout.hint_writer is {hint_writer!r}; the teachers are {', '.join(names) or 'none'}"
        )
    if not settings.teachers or not settings.max_asks_per_episode:
        return None
    client = await stack.enter_async_context(httpx.AsyncClient())
    cache = None
    if settings.cache_mb:
        cache = AnswerCache(answers_folder(run_dir), max_bytes=int(settings.cache_mb * 1e6))
    ledger = None
    if not all(spec.is_free for spec in settings.teachers):
        ledger = await _open_ledger(run_dir, settings)
        stack.push_async_callback(partial(aside, ledger.close, name="ledger"))
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
    uncertainty = Uncertainty(quantile=settings.uncertain_quantile, nats=settings.uncertain_nats)
    writer = teachers[names.index(hint_writer)] if hint_writer is not None else None
    return Asking(
        teachers, rule_of(settings), uncertainty=uncertainty, writer=writer, ledger=ledger, cache=cache
    )


async def _open_ledger(run_dir: Path, settings: TeachersConfig) -> Ledger:
    path = run_dir / "teachers" / "ledger.jsonl"
    opened = partial(
        Ledger,
        path,
        budget_usd=settings.budget_usd,
        episode_budget_usd=settings.episode_budget_usd,
    )
    try:
        return await aside(opened, name="ledger", limit_s=OPEN_S)
    except TimeoutError:
        raise LedgerFailed(
            f"cannot open the ledger {path}: no answer from the disk for {OPEN_S:g} s"
        ) from None


def place_of(episode_id: str) -> str:
    """What pays for an episode: its place in the group. A lost try, whose successors end in ``.1`` and so on, has spent
    of the same cap."""
    return _TRY.sub("", episode_id)


def answers_folder(run_dir: Path) -> Path:
    """Where the answers of teachers are kept."""
    return run_dir / "cache" / "teachers"


def rule_of(settings: TeachersConfig) -> AskRule:
    """When to ask, as the settings say."""
    return AskRule(
        agree=settings.agree,
        ask_probability=settings.ask_probability,
        max_asks=settings.max_asks_per_episode,
        deadline_s=settings.deadline_s,
        ask=settings.ask,
        verify=settings.verify,
    )
