"""Does a student use hints? Measured where hint distillation works: at its own failing calls.

For states of held-out tasks the student is asked for its next call. Where that call fails, three contexts are
compared: no hint, the matching hint (made from that very error), and a hint that belongs to another failure.
A student that uses hints gives the failing call less and the right call more probability with the matching
hint than with the other one. No model-written code runs here: tests are never called.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from renderers import Qwen3RendererConfig, create_renderer
from transformers import AutoTokenizer, Qwen3ForCausalLM

from hintloop.agent.student.attempts import Attempt, attempts
from hintloop.envs.tasksets.bugfix.taskset import load


@dataclass(frozen=True, slots=True)
class Row:
    """Change of a whole call's log-prob (nats) by a hint, with its standard error, over ``n`` failing calls."""

    kind: str
    n: int
    failing_matching: tuple[float, float]
    failing_other: tuple[float, float]
    failing_difference: tuple[float, float]
    """Matching less other, call by call: below 0 where hints are used."""
    right_matching: tuple[float, float]
    right_other: tuple[float, float]
    right_difference: tuple[float, float]
    """The same: above 0 where hints are used."""


def measure(folder: Path, *, num_states: int = 1500, split: str = "heldmut", seed: int = 0) -> list[Row]:
    """One row per error kind with at least 10 failing calls, and one for all. Takes about a minute."""
    torch.manual_seed(seed)
    rng = random.Random(seed)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model: Any = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.eval()
    renderer = create_renderer(tokenizer, Qwen3RendererConfig())
    failures: list[Attempt] = []
    task_ids = load().splits()[split]
    for _ in range(num_states // 32):
        tasks = [load().get(rng.choice(task_ids)) for _ in range(32)]
        tried = attempts(model, renderer, tokenizer, tasks, has_read=rng.random() < 0.8)
        failures += [attempt for attempt in tried if attempt.hint]
    changes = [
        (failure.kind, _changes(model, failure, _other_hint(failures, failure, rng))) for failure in failures
    ]
    kinds = sorted({kind for kind, _ in changes if kind})
    groups = [(kind, [c for k, c in changes if k == kind]) for kind in kinds]
    return [_row(kind, rows) for kind, rows in [*groups, ("all", [c for _, c in changes])] if len(rows) >= 10]


def _other_hint(failures: Sequence[Attempt], failure: Attempt, rng: random.Random) -> str:
    others = [other.hint for other in failures if other.hint and other.hint != failure.hint]
    return rng.choice(others) if others else "Hint: print less, for example with head or grep"


def _changes(model: Any, failure: Attempt, other: str) -> tuple[float, ...]:
    """The columns of ``Row``, of one failing call."""
    contexts = [failure.context, failure.hinted(failure.hint or ""), failure.hinted(other)]
    changes: list[float] = []
    for said in (failure.said, failure.right):
        plain, matching, another = (_logprob(model, context, said) for context in contexts)
        changes += [matching - plain, another - plain, matching - another]
    return tuple(changes)


@torch.no_grad()
def _logprob(model: Any, context: list[int], said: list[int]) -> float:
    """Log-prob of ``said`` after ``context``, nats."""
    logits = model(torch.tensor([context + said])).logits[0, len(context) - 1 : -1]
    return float(torch.log_softmax(logits, -1).gather(1, torch.tensor(said)[:, None]).sum())


def _row(kind: str, changes: Sequence[tuple[float, ...]]) -> Row:
    columns = [(fmean(c), stdev(c) / len(c) ** 0.5) for c in zip(*changes, strict=True)]
    return Row(kind, len(changes), *columns)
