"""The second part of the warm start: practice in using hints, at the student's own mistakes.

The student plays training tasks. Where its call fails, it is taught the right call after the matching hint,
and its own failing call after a hint that belongs to another failure. So what a hint says decides, not that
there is one; without that contrast a student learns that any hint means care, and hint distillation has
nothing to teach it. What it does without a hint is kept by traces as in the first part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from hintloop.agent.student.attempts import Attempt, attempts
from hintloop.agent.student.encode import Encoded, TraceEncoder
from hintloop.agent.student.fit import Fit
from hintloop.agent.student.traces import TraceMaker

TASKS_PER_ROUND = 64
TURNS = 3
TRACE_SHARE = 0.25
"""Part of a batch that is traces."""
_SHARE_READ = 0.8


def practise(
    fit: Fit,
    maker: TraceMaker,
    encoder: TraceEncoder,
    *,
    steps: int,
    batch_size: int,
    rate: float,
    max_length: int,
    on_step: Callable[[int, dict[str, float]], None],
) -> None:
    """Train ``steps`` steps; step sizes fall linearly from ``rate`` times their peak to a tenth of that."""
    rows = _practice_rows(fit, maker, encoder, max_length)
    num_traces = round(batch_size * TRACE_SHARE)
    for step in range(steps):
        batch = [next(rows) for _ in range(batch_size - num_traces)]
        batch += [encoder.encode(maker.single(), max_length) for _ in range(num_traces)]
        on_step(step, fit.step(batch, rate * (1 - 0.9 * step / steps)))


def _practice_rows(fit: Fit, maker: TraceMaker, encoder: TraceEncoder, max_length: int) -> Iterator[Encoded]:
    """Without end; the student that plays is the one in training."""
    rng = maker.rng
    while True:
        tasks = [maker.task() for _ in range(TASKS_PER_ROUND)]
        has_read = rng.random() < _SHARE_READ
        found = attempts(
            fit.model, encoder.renderer, encoder.tokenizer, tasks, has_read=has_read, turns=TURNS
        )
        rows = [row for attempt in found for row in _contrast(attempt, found, maker, encoder)]
        rng.shuffle(rows)
        yield from (row for row in rows if len(row.token_ids) <= max_length)


def _contrast(
    attempt: Attempt, others: list[Attempt], maker: TraceMaker, encoder: TraceEncoder
) -> list[Encoded]:
    """The right call after the matching hint, and the student's own call after another one."""
    rows = [encoder.turn(attempt.hinted(attempt.hint), attempt.right)] if attempt.hint else []
    hints = sorted({other.hint for other in others if other.hint and other.hint != attempt.hint})
    if hints:
        rows.append(encoder.turn(attempt.hinted(maker.rng.choice(hints)), attempt.said))
    return rows
