"""The second part of the warm start: practice in using hints, at calls that the student makes itself.

The student of the first part, which stays as it is, plays training tasks. Where its call fails, the matching
hint is to make that call less likely and the right one likelier. Behind a hint that belongs to another failure,
and behind none, nothing is to change. So what a hint says decides, not that there is one; without that contrast
a student learns that any hint means care, and hint distillation has nothing to teach it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.nn.functional import huber_loss, kl_div, logsigmoid

from hintloop.agent.student.attempts import Attempt, attempts
from hintloop.agent.student.fit import Fit
from hintloop.agent.student.traces import TraceMaker
from hintloop.learner.packing import Path, grow, pack

TASKS_PER_ROUND = 64
MAX_EMPTY_ROUNDS = 2
TURNS = 3
_SHARE_READ = 0.8

_CALLS = 2.0
_WITHOUT = 0.5
_PREFERENCE = 2.0
_LIKELIHOOD = 0.2
"""Weights of the parts of the losses."""

Turn = tuple[list[int], Sequence[list[int]]]
"""A context and calls that may follow it."""
Said = tuple[torch.Tensor, torch.Tensor]
"""What ``logprobs`` finds."""


def practise(
    fit: Fit,
    maker: TraceMaker,
    renderer: Any,
    tokenizer: Any,
    *,
    steps: int,
    batch_size: int,
    rate: float,
    on_step: Callable[[int, dict[str, float]], None],
) -> None:
    """Train ``steps`` steps; step sizes fall linearly from ``rate`` times their peak to a tenth of that."""
    start = copy.deepcopy(fit.averaged)
    fit.model.load_state_dict(start.state_dict())
    failures = _failures(start, maker, renderer, tokenizer)
    for step in range(steps):
        chosen = [next(failures) for _ in range(batch_size)]
        same, better = contrast(fit.model, start, chosen)
        fit.step(same + better, rate * (1 - 0.9 * step / steps))
        on_step(step, {"same": float(same.detach()), "better": float(better.detach())})


def _failures(
    student: Any, maker: TraceMaker, renderer: Any, tokenizer: Any
) -> Iterator[tuple[Attempt, str]]:
    """Without end: failed turns of the student, each with the hint of another failure.

    ``ValueError`` when a student is not far enough to fail in a way that has a hint.
    """
    empty = 0
    while empty < MAX_EMPTY_ROUNDS:
        tasks = [maker.task() for _ in range(TASKS_PER_ROUND)]
        has_read = maker.rng.random() < _SHARE_READ
        found = attempts(student, renderer, tokenizer, tasks, has_read=has_read, turns=TURNS)
        failed = [attempt for attempt in found if attempt.hint]
        hints = sorted({attempt.hint for attempt in failed if attempt.hint})
        maker.rng.shuffle(failed)
        for attempt in failed if len(hints) > 1 else ():
            yield attempt, maker.rng.choice([hint for hint in hints if hint != attempt.hint])
        empty = 0 if len(hints) > 1 else empty + 1
    raise ValueError(
        "the student makes no complete calls yet, so it cannot practise with hints: train it longer"
    )


def contrast(
    student: Any, start: Any, chosen: Sequence[tuple[Attempt, str]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Two losses over the right and the failing call of each turn, nats per call.

    The first: behind the other hint, and at a quarter of the turns without any, everything is to be as ``start`` has
    it without a hint. The second, behind the matching hint: DPO of the right over the failing call, with ``start``
    without a hint as its reference, and the likelihood of the right call.
    """

    def turns(hints: Sequence[str | None]) -> list[Turn]:
        cases = zip(chosen, hints, strict=False)
        return [(a.hinted(hint) if hint else a.context, (a.right, a.said)) for (a, _), hint in cases]

    few = max(1, len(chosen) // 4)
    with torch.no_grad():
        before = logprobs(start, turns([None] * len(chosen)))
        few_before = logprobs(start, turns([None] * few))
    other = _change(before, logprobs(student, turns([hint for _, hint in chosen])))
    none = _change(few_before, logprobs(student, turns([None] * few)))
    _, hinted = logprobs(student, turns([attempt.hint for attempt, _ in chosen]))
    right, failing = (hinted - before[1]).view(-1, 2).unbind(1)
    better = -logsigmoid(right - failing).mean() * _PREFERENCE - _LIKELIHOOD * hinted[::2].mean()
    return other + none * _WITHOUT, better


def _change(before: Said, after: Said) -> torch.Tensor:
    """How far distributions and calls are from what they were. Unlikely calls hardly show in the former."""
    distributions = kl_div(after[0], before[0], reduction="sum", log_target=True) / len(before[1])
    return distributions + huber_loss(after[1], before[1]) * _CALLS


def logprobs(model: Any, turns: Sequence[Turn]) -> Said:
    """Log-probabilities (nats) of the vocabulary at the N tokens that the turns say, ``(N, V)``, and of each call.

    The calls of a turn are branches of one row, which has the turn's context once.
    """
    trees = [
        grow(np.array(context), [Path(len(context), np.array(call)) for call in calls], keep=len(context))
        for context, calls in turns
    ]
    packed = pack(trees)
    states = model.model(
        input_ids=packed.ids, attention_mask=packed.mask(), position_ids=packed.positions, use_cache=False
    ).last_hidden_state
    calls = [
        (row, call, tree.columns(path, np.arange(len(context) - 1, len(context) + len(call) - 1)))
        for row, ((context, said), tree) in enumerate(zip(turns, trees, strict=True))
        for path, call in enumerate(said)
    ]
    lengths = [len(call) for _, call, _ in calls]
    rows = np.repeat([row for row, *_ in calls], lengths)
    columns = np.concatenate([where for *_, where in calls])
    numbers = torch.from_numpy(np.repeat(np.arange(len(calls)), lengths))
    found = torch.log_softmax(model.lm_head(states[rows, columns]), -1)
    tokens = torch.tensor([token for _, call, _ in calls for token in call])
    said = found.gather(1, tokens[:, None])[:, 0]
    return found, torch.zeros(len(calls)).index_add(0, numbers, said)
