"""Recorded states to pairs that are fit for training, in one call: ask, agree, normalise.

    pairs = replay_and_normalize_trace_sync(states, teachers, folder=Path("replay"), budget_usd=2.0)
    save_pairs(pairs, Path("pairs.jsonl"))

See ``replay_api`` for the teachers and ``hintloop.replay.normalize`` for the normaliser.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from hintloop.replay.normalize import DJNormalizer, NormalizedDPOPair
from hintloop.rollout.config import TeacherSpec
from hintloop.rollout.replay_api import DEFAULT_TEACHERS, TraceState, extract_dpo_pairs, replay_trace

__all__ = [
    "DJNormalizer",
    "NormalizedDPOPair",
    "replay_and_normalize_trace",
    "replay_and_normalize_trace_sync",
]


async def replay_and_normalize_trace(
    states: Sequence[TraceState],
    teachers: Sequence[TeacherSpec] = DEFAULT_TEACHERS,
    *,
    folder: Path,
    budget_usd: float | None = None,
    agreeing: int = 2,
    normalizer: DJNormalizer | None = None,
) -> list[NormalizedDPOPair]:
    """The same as ``replay_and_normalize_trace_sync``, in a thread; it goes on when this is cancelled."""
    return await asyncio.to_thread(
        replay_and_normalize_trace_sync,
        states,
        teachers,
        folder=folder,
        budget_usd=budget_usd,
        agreeing=agreeing,
        normalizer=normalizer,
    )


def replay_and_normalize_trace_sync(
    states: Sequence[TraceState],
    teachers: Sequence[TeacherSpec] = DEFAULT_TEACHERS,
    *,
    folder: Path,
    budget_usd: float | None = None,
    agreeing: int = 2,
    normalizer: DJNormalizer | None = None,
) -> list[NormalizedDPOPair]:
    """Ask the teachers as ``replay_trace`` does, take what ``agreeing`` of them give, and drop what is not fit.

    ``normalizer`` is data-juicer with its default recipe. Blocks. Errors of ``replay_trace``; ``NormalizerFailed``,
    after which the same call asks nothing again.
    """
    results = replay_trace(states, teachers, folder=folder, budget_usd=budget_usd)
    return (normalizer or DJNormalizer()).normalize(extract_dpo_pairs(states, results, agreeing=agreeing))
