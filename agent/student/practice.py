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

import torch
from torch.nn.functional import kl_div, logsigmoid

from hintloop.agent.student.attempts import Attempt, attempts
from hintloop.agent.student.fit import Fit
from hintloop.agent.student.traces import TraceMaker

TASKS_PER_ROUND = 64
TURNS = 3
_SHARE_READ = 0.8

Turn = tuple[list[int], list[int]]
"""A context and what is said in it."""


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
    played = _play(start, maker, renderer, tokenizer)
    for step in range(steps):
        chosen = [next(played) for _ in range(batch_size)]
        failed = [attempt for attempt, _ in chosen if attempt.hint]
        losses = {"same": sameness(fit.model, start, chosen)}
        if failed:
            losses["better"] = preference(fit.model, start, failed)
        fit.step(torch.stack(list(losses.values())).sum(), rate * (1 - 0.9 * step / steps))
        on_step(step, {name: float(loss.detach()) for name, loss in losses.items()})


def _play(student: Any, maker: TraceMaker, renderer: Any, tokenizer: Any) -> Iterator[tuple[Attempt, str]]:
    """Without end: turns of the student, each with the hint of another failure."""
    while True:
        tasks = [maker.task() for _ in range(TASKS_PER_ROUND)]
        has_read = maker.rng.random() < _SHARE_READ
        found = attempts(student, renderer, tokenizer, tasks, has_read=has_read, turns=TURNS)
        hints = sorted({attempt.hint for attempt in found if attempt.hint})
        maker.rng.shuffle(found)
        for attempt in found:
            others = [hint for hint in hints if hint != attempt.hint]
            if others:
                yield attempt, maker.rng.choice(others)


def sameness(student: Any, start: Any, chosen: Sequence[tuple[Attempt, str]]) -> torch.Tensor:
    """KL(start without a hint || student), nats per turn: without a hint, and behind the other one."""
    plain = [(attempt.context, attempt.said) for attempt, _ in chosen]
    other = [(attempt.hinted(hint), attempt.said) for attempt, hint in chosen]
    with torch.no_grad():
        wanted = logprobs(start, plain)[0].repeat(2, 1)
    found = logprobs(student, plain + other)[0]
    return kl_div(found, wanted, reduction="sum", log_target=True) / len(chosen)


def preference(student: Any, start: Any, failed: Sequence[Attempt]) -> torch.Tensor:
    """DPO of the right over the failing call behind the hint, with the start without a hint as its reference.

    Lowering an unlikely call takes a loss of its own: the likelihood of the right one hardly notices it.
    """
    calls = [(attempt, said) for attempt in failed for said in (attempt.right, attempt.said)]
    with torch.no_grad():
        before = _sums(start, [(attempt.context, said) for attempt, said in calls])
    after = _sums(student, [(attempt.hinted(attempt.hint or ""), said) for attempt, said in calls])
    right, failing = (after - before).view(-1, 2).unbind(1)
    return -logsigmoid(right - failing).mean() - (after[::2] / len(failed)).sum()


def _sums(model: Any, turns: Sequence[Turn]) -> torch.Tensor:
    """Log-probability of what each turn says, nats."""
    found, tokens, numbers = logprobs(model, turns)
    return torch.zeros(len(turns)).index_add(0, numbers, found.gather(1, tokens[:, None])[:, 0])


def logprobs(model: Any, turns: Sequence[Turn]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(N, V) log-probabilities at the N tokens that the turns say, these tokens, and the turn of each."""
    ids = torch.zeros(len(turns), max(len(a) + len(b) for a, b in turns), dtype=torch.long)
    used = torch.zeros_like(ids, dtype=torch.bool)
    for index, (context, said) in enumerate(turns):
        end = len(context) + len(said)
        ids[index, :end] = torch.tensor(context + said)
        used[index, len(context) - 1 : end - 1] = True
    found = torch.log_softmax(model.lm_head(model.model(ids).last_hidden_state[used]), -1)
    numbers, columns = used.nonzero(as_tuple=True)
    return found, ids[numbers, columns + 1], numbers
