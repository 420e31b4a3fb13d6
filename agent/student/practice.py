"""The second part of the warm start: practice in using hints, at the student's own calls.

The student plays training tasks. Where its call fails, the matching hint is to make that call less likely and
the right one likelier than they are without it.
After a hint that belongs to another failure it is taught to go on as without one: its distribution over the
whole turn is pulled to the one that it has without the hint. So what a hint says decides, not that there is
one; without that contrast a student learns that any hint means care, and hint distillation has nothing to
teach it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from hintloop.agent.student.attempts import Attempt, attempts
from hintloop.agent.student.encode import TraceEncoder
from hintloop.agent.student.fit import BetterTurn, Fit, SameTurn
from hintloop.agent.student.traces import TraceMaker

TASKS_PER_ROUND = 64
TURNS = 3
TRACE_SHARE = 0.25
"""Traces in a batch, as a part of it: they keep what the student does without hints."""
_SHARE_READ = 0.8


def practise(
    fit: Fit,
    maker: TraceMaker,
    encoder: TraceEncoder,
    *,
    steps: int,
    batch_size: int,
    rate: float,
    on_step: Callable[[int, dict[str, float]], None],
) -> None:
    """Train ``steps`` steps; step sizes fall linearly from ``rate`` times their peak to a tenth of that."""
    played = _play(fit, maker, encoder)
    num_traces = round(batch_size * TRACE_SHARE)
    for step in range(steps):
        chosen = [next(played) for _ in range(batch_size - num_traces)]
        better = [BetterTurn(a.context, a.hinted(a.hint), a.right, a.said) for a, _ in chosen if a.hint]
        traces = [encoder.encode(maker.single()) for _ in range(num_traces)]
        same = [SameTurn(a.context, a.hinted(other), a.said) for a, other in chosen]
        on_step(step, fit.step(traces, rate * (1 - 0.9 * step / steps), same, better))


def _play(fit: Fit, maker: TraceMaker, encoder: TraceEncoder) -> Iterator[tuple[Attempt, str]]:
    """Without end: turns of the student in training, each with the hint of another failure."""
    while True:
        tasks = [maker.task() for _ in range(TASKS_PER_ROUND)]
        has_read = maker.rng.random() < _SHARE_READ
        found = attempts(
            fit.model, encoder.renderer, encoder.tokenizer, tasks, has_read=has_read, turns=TURNS
        )
        hints = sorted({attempt.hint for attempt in found if attempt.hint})
        maker.rng.shuffle(found)
        for attempt in found:
            others = [hint for hint in hints if hint != attempt.hint]
            if others:
                yield attempt, maker.rng.choice(others)
