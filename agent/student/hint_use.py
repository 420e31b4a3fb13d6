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

from hintloop.agent import hints
from hintloop.agent.conversation import Conversation
from hintloop.agent.engine import Sample
from hintloop.agent.student.traces import TrustedWorkspace, call_text, first_messages
from hintloop.envs.models import ToolCall
from hintloop.envs.task import Task
from hintloop.envs.tasksets.bugfix.expert import next_fix
from hintloop.envs.tasksets.bugfix.taskset import PATH, load
from hintloop.envs.tools import ToolBox

MAX_NEW_TOKENS = 64
_READ = ToolCall(name="read_file", arguments={"path": PATH})


@dataclass(frozen=True, slots=True)
class Row:
    """Change of a whole call's log-prob (nats) by a hint, with its standard error, over ``n`` failing calls."""

    kind: str
    n: int
    failing_matching: tuple[float, float]
    failing_other: tuple[float, float]
    right_matching: tuple[float, float]
    right_other: tuple[float, float]


@dataclass(frozen=True, slots=True)
class _Failure:
    conversation: Conversation
    kind: str
    hint: str
    failing: list[int]
    right: list[int]


def measure(folder: Path, *, num_states: int = 1500, split: str = "heldmut", seed: int = 0) -> list[Row]:
    """One row per error kind with at least 10 failing calls, and one for all. Takes about a minute."""
    torch.manual_seed(seed)
    rng = random.Random(seed)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model: Any = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.eval()
    renderer = create_renderer(tokenizer, Qwen3RendererConfig())
    failures: list[_Failure] = []
    task_ids = load().splits()[split]
    for _ in range(num_states // 32):
        tasks = [load().get(rng.choice(task_ids)) for _ in range(32)]
        failures += _failures(model, renderer, tokenizer, tasks, after_reading=rng.random() < 0.8)
    changes = [
        (failure.kind, _changes(model, failure, _other_hint(failures, failure, rng))) for failure in failures
    ]
    kinds = sorted({kind for kind, _ in changes})
    groups = [(kind, [c for k, c in changes if k == kind]) for kind in kinds]
    return [_row(kind, rows) for kind, rows in [*groups, ("all", [c for _, c in changes])] if len(rows) >= 10]


def _failures(
    model: Any, renderer: Any, tokenizer: Any, tasks: Sequence[Task], *, after_reading: bool
) -> list[_Failure]:
    """Let the student take one turn in each task; keep the turns whose call fails."""
    conversations, boxes = [], []
    for task in tasks:
        conversation = Conversation(renderer, first_messages(task))
        box = ToolBox(task, TrustedWorkspace({PATH: task.files[PATH].encode()}))
        if after_reading:
            said = tokenizer.encode(call_text(_READ) + "<|im_end|>", add_special_tokens=False)
            conversation.add_sample(Sample(tuple(said), (0.0,) * len(said), (0,) * len(said), "stop"))
            conversation.add_results([box.call(_READ).output])
        conversations.append(conversation)
        boxes.append(box)
    completions = _sample(model, [c.token_ids for c in conversations], model.config.eos_token_id)
    failures = []
    for task, conversation, box, said in zip(tasks, conversations, boxes, completions, strict=True):
        call = conversation.parse(said)[0]
        if said[-1] != model.config.eos_token_id or call.name in ("run_tests", "bash", "submit"):
            continue
        error = box.call(call).error
        hint = hints.dispatch(error) if error else None
        right = next_fix(task.files[PATH], task.solution[PATH]) if after_reading else _READ
        if error and hint and right:
            text = call_text(right) + "<|im_end|>"
            tokens = tokenizer.encode(text, add_special_tokens=False)
            failures.append(_Failure(conversation, error.kind, hint, said, tokens))
    return failures


@torch.no_grad()
def _sample(model: Any, prompts: list[list[int]], stop: int) -> list[list[int]]:
    """One continuation per prompt at temperature 1."""
    length = max(map(len, prompts))
    ids = torch.zeros(len(prompts), length, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for index, prompt in enumerate(prompts):
        ids[index, length - len(prompt) :] = torch.tensor(prompt)
        mask[index, length - len(prompt) :] = 1
    out = model.generate(
        ids, attention_mask=mask, do_sample=True, temperature=1.0, top_k=0, max_new_tokens=MAX_NEW_TOKENS
    )[:, length:]
    completions = []
    for row in out.tolist():
        end = row.index(stop) + 1 if stop in row else len(row)
        completions.append(row[:end])
    return completions


def _other_hint(failures: Sequence[_Failure], failure: _Failure, rng: random.Random) -> str:
    others = [other.hint for other in failures if other.hint != failure.hint]
    return rng.choice(others) if others else "Hint: print less, for example with head or grep"


def _changes(model: Any, failure: _Failure, other: str) -> tuple[float, float, float, float]:
    conversation = failure.conversation
    turn = conversation.num_turns - 1
    plain = conversation.token_ids
    contexts = [plain]
    for hint in (failure.hint, other):
        where = conversation.hint(turn, hint)
        contexts.append(plain[: where.insert_at] + list(where.hint_ids) + plain[where.insert_at :])
    failing = [_logprob(model, context, failure.failing) for context in contexts]
    right = [_logprob(model, context, failure.right) for context in contexts]
    return failing[1] - failing[0], failing[2] - failing[0], right[1] - right[0], right[2] - right[0]


@torch.no_grad()
def _logprob(model: Any, context: list[int], said: list[int]) -> float:
    """Log-prob of ``said`` after ``context``, nats."""
    logits = model(torch.tensor([context + said])).logits[0, len(context) - 1 : -1]
    return float(torch.log_softmax(logits, -1).gather(1, torch.tensor(said)[:, None]).sum())


def _row(kind: str, changes: Sequence[tuple[float, float, float, float]]) -> Row:
    columns = [(fmean(c), stdev(c) / len(c) ** 0.5) for c in zip(*changes, strict=True)]
    return Row(kind, len(changes), *columns)
