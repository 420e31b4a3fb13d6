"""One turn over as many requests as it takes: nothing sampled is lost, and nothing is sampled twice.

A request that brought nothing is simply made again. What a broken one did bring stays, with its recorded
log-probabilities, and the next request goes on from there; so a server that dies does not favour short turns.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count

from hintloop.agent.engine import EngineError, Sample, Sampling
from hintloop.rollout.engines.answer import Piece

PAUSE_S, MAX_PAUSE_S = 0.02, 1.0

Ask = Callable[[Sequence[int], Sampling], Awaitable[Piece]]
"""Sends one request, to whatever server is fit for it."""


@dataclass(slots=True)
class TurnCounts:
    """Totals over all turns."""

    turns: int = 0
    sampled_tokens: int = 0
    retries: int = 0
    continued_tokens: int = 0
    """Tokens that were kept of requests that broke."""
    moves: int = 0
    """Requests that a busy server was late with, made anew; mostly at one that had less to do."""


async def sample_turn(
    ask: Ask, prompt_ids: Sequence[int], sampling: Sampling, *, seconds: float, counts: TurnCounts
) -> Sample:
    """Sample until the turn is complete. Raises ``EngineError`` after ``seconds``, and what ``ask`` raises."""
    whole, problem = Piece(), "no server was there, or none got to it"
    try:
        async with asyncio.timeout(seconds):
            for tries in count():
                left = sampling.max_new_tokens - len(whole.token_ids)
                piece = await ask((*prompt_ids, *whole.token_ids), replace(sampling, max_new_tokens=left))
                whole = _joined(whole, piece)
                if whole.finish_reason:
                    break
                problem = piece.problem
                if piece.slow:  # without a pause, in which the place that it was moved to would not count it
                    counts.moves += 1
                    continue
                counts.retries += 1
                counts.continued_tokens += len(piece.token_ids)
                await asyncio.sleep(min(MAX_PAUSE_S, PAUSE_S * 2 ** min(tries, 8)) * random.random())
    except TimeoutError:
        raise EngineError(f"no complete answer within {seconds:g} s; last: {problem}") from None
    counts.turns += 1
    counts.sampled_tokens += len(whole.token_ids)
    return Sample(whole.token_ids, whole.logprobs, whole.versions, whole.finish_reason)


def _joined(first: Piece, second: Piece) -> Piece:
    return Piece(
        first.token_ids + second.token_ids,
        first.logprobs + second.logprobs,
        first.versions + second.versions,
        second.finish_reason,
    )
