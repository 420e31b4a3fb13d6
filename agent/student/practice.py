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
MAX_EMPTY_ROUNDS = 2
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

    The first: without a hint and behind the other one, the distribution at each token and the log-probability of
    the call are to be those of ``start`` without a hint (KL, squared difference: unlikely calls hardly show in the
    former). The second, behind the matching hint: DPO of the right over the failing call, with ``start`` without
    a hint as its reference, and the likelihood of the right call.
    """
    calls = [(attempt, hint, said) for attempt, hint in chosen for said in (attempt.right, attempt.said)]
    plain = [(attempt.context, said) for attempt, _, said in calls]
    with torch.no_grad():
        wanted, before = logprobs(start, plain)
    found, after = logprobs(student, plain + [(attempt.hinted(hint), said) for attempt, hint, said in calls])
    same = kl_div(found, wanted.repeat(2, 1), reduction="sum", log_target=True) / len(calls)
    same = same + (after - before.repeat(2)).square().mean()
    _, hinted = logprobs(student, [(attempt.hinted(attempt.hint or ""), said) for attempt, _, said in calls])
    right, failing = (hinted - before).view(-1, 2).unbind(1)
    return same, -logsigmoid(right - failing).mean() - hinted[::2].mean()


def logprobs(model: Any, turns: Sequence[Turn]) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities (nats) of the vocabulary at the N tokens that the turns say, ``(N, V)``, and of each turn."""
    ids = torch.zeros(len(turns), max(len(a) + len(b) for a, b in turns), dtype=torch.long)
    used = torch.zeros_like(ids, dtype=torch.bool)
    for index, (context, said) in enumerate(turns):
        end = len(context) + len(said)
        ids[index, :end] = torch.tensor(context + said)
        used[index, len(context) - 1 : end - 1] = True
    found = torch.log_softmax(model.lm_head(model.model(ids).last_hidden_state[used]), -1)
    numbers, columns = used.nonzero(as_tuple=True)
    said_tokens = found.gather(1, ids[numbers, columns + 1][:, None])[:, 0]
    return found, torch.zeros(len(turns)).index_add(0, numbers, said_tokens)
