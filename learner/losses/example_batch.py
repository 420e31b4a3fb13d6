"""A batch with all three channels, from a tiny story told with any tokenizer.

An agent is asked to correct a function, and its edit names text that the file does not hold. A hint, put in front
of just this turn, makes the same model a teacher there; the edit that works is preferred; and what the agent does
after the error is imitated.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from jinja2.exceptions import TemplateError

from hintloop.learner.losses.loss_batch import Hinted, LossBatch, Pairs, Rows

Variant = Literal["factorial", "binary_search"]
Message = dict[str, str]


@dataclass(frozen=True, slots=True)
class _Bug:
    source: str
    wrong_old: str
    old: str
    new: str


_BUGS: dict[Variant, _Bug] = {
    "factorial": _Bug(
        "def factorial(n):\n    out = 1\n    for i in range(1, n):\n        out *= i\n    return out\n",
        "range(n)",
        "range(1, n)",
        "range(1, n + 1)",
    ),
    "binary_search": _Bug(
        "def search(xs, x):\n    low, high = 0, len(xs)\n    while low < high:\n        mid = (low + high) // 2\n"
        "        if xs[mid] < x:\n            low = mid\n        else:\n            high = mid\n    return low\n",
        "low = middle",
        "low = mid",
        "low = mid + 1",
    ),
}


@dataclass(frozen=True, slots=True)
class _Told:
    """The story as token ids, piece by piece in the order of the rollout."""

    task: list[int]
    header: list[int]
    """Generation prompt of the failing turn."""
    failing: list[int]
    result: list[int]
    """The tool's answer and the next generation prompt."""
    working: list[int]
    hint: list[int]


def build_batch(tokenizer: Any, variant: Variant = "factorial") -> LossBatch:
    """One rollout row, one hint and one pair about a buggy function, on the CPU.

    ``tokenizer`` is a Hugging Face one. Its chat template is used; without one, each message is
    ``role:\\ncontent`` plus the end-of-sequence token, if there is one, and a line feed. Every turn is tokenised
    once and by itself, as an agent would have sampled it, and the hint is inserted as ids in front of the failing
    turn's generation prompt: as a system message, as a user message where the template takes no system message
    there, and as a line of plain text where it takes neither.

    ``rollout`` trains the turn after the error; ``hinted`` all tokens of the failing turn, its end-of-turn token
    (the first special token after its text, or the first token without any) included; ``pairs`` prefers the
    working edit at the failing turn, and has no reference yet. ``ValueError`` for an unknown variant, and for a
    tokenizer that leaves nothing of a piece or whose template leaves out a turn.
    """
    if variant not in get_args(Variant):
        raise ValueError(f"variant must be one of {get_args(Variant)}, not {variant!r}")
    told = _tell(tokenizer, _BUGS[variant])
    prompt = told.task + told.header
    rollout = _rows([(prompt + told.failing + told.result, told.working)])
    teacher = _rows([(told.task + told.hint + told.header, told.failing)])
    student_at, teacher_at = (
        torch.tensor([(0, start + i) for i in range(len(told.failing))])
        for start in (len(prompt), len(prompt) + len(told.hint))
    )
    pairs = _rows([(prompt, told.working), (prompt, told.failing)])
    return LossBatch(rollout, Hinted(teacher, student_at, teacher_at), Pairs(pairs))


def _rows(sequences: list[tuple[list[int], list[int]]]) -> Rows:
    """Each of a context and the trained tokens after it. Padding is never read, so it can be any token."""
    length = max(len(context) + len(trained) for context, trained in sequences)
    ids = torch.zeros(len(sequences), length, dtype=torch.int64)
    attended, trained_mask = (torch.zeros(ids.shape, dtype=torch.bool) for _ in range(2))
    for row, (context, trained) in enumerate(sequences):
        end = len(context) + len(trained)
        ids[row, :end] = torch.tensor(context + trained)
        attended[row, :end] = True
        trained_mask[row, len(context) : end] = True
    return Rows(ids, attended, trained_mask)


def _tell(tokenizer: Any, bug: _Bug) -> _Told:
    user = {"role": "user", "content": f"Correct the bug in main.py with edit_file.\n{bug.source}".strip()}
    failing, working = _call(bug.wrong_old, bug.new), _call(bug.old, bug.new)
    error = {"role": "user", "content": f"error: {bug.wrong_old!r} is not in main.py"}
    turns = [user, _said(failing), error, _said(working)]
    # a last message, so that what a template puts after its very last turn is not the end of a turn
    text = _render(tokenizer, [*turns, {"role": "user", "content": "done"}])
    before, between, after = _around(text, failing, working)
    task = _shared(_render(tokenizer, [user]), before)
    hint = _hint(tokenizer, [user], task, f"Hint: main.py holds {bug.old!r}; old must be text of the file.")

    def encode(piece: str) -> list[int]:
        return list(tokenizer.encode(piece, add_special_tokens=False))

    result, rest = encode(between), encode(after)
    ends, last = (_end_of_turn(tokenizer, ids) for ids in (result, rest))
    told = _Told(
        task=encode(task),
        header=encode(before[len(task) :]),
        failing=encode(failing) + result[:ends],
        result=result[ends:],
        working=encode(working) + rest[:last],
        hint=encode(hint),
    )
    if not (told.task and told.failing and told.working and told.hint):
        raise ValueError("this tokenizer leaves no tokens of the task, a turn or the hint")
    return told


def _call(old: str, new: str) -> str:
    call = {"name": "edit_file", "arguments": {"path": "main.py", "old": old, "new": new}}
    return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"


def _said(content: str) -> Message:
    return {"role": "assistant", "content": content}


def _render(tokenizer: Any, messages: list[Message]) -> str:
    if tokenizer.chat_template:
        return str(tokenizer.apply_chat_template(messages, tokenize=False))
    end = tokenizer.eos_token or ""
    return "".join(f"{message['role']}:\n{message['content']}{end}\n" for message in messages)


def _around(text: str, first: str, second: str) -> tuple[str, str, str]:
    """What stands before, between and after the two turns."""
    before, found, rest = text.partition(first)
    between, found_too, after = rest.partition(second)
    if not (found and found_too):
        raise ValueError("this chat template leaves out a turn or changes its text")
    return before, between, after


def _shared(one: str, other: str) -> str:
    """The longest beginning that both have."""
    differ = (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return one[: next(differ, min(len(one), len(other)))]


def _hint(tokenizer: Any, messages: list[Message], task: str, hint: str) -> str:
    """The hint as the template writes it after ``task``, which is the rendered ``messages``."""
    for role in ("system", "user"):
        try:
            text = _render(tokenizer, [*messages, {"role": role, "content": hint}])
        except TemplateError:  # a template says so of a role that it does not take here
            continue
        if text.startswith(task) and hint in text[len(task) :]:
            return text[len(task) :]
    return f"{hint}\n"


def _end_of_turn(tokenizer: Any, ids: list[int]) -> int:
    """Number of tokens after a turn's text that belong to it: up to the first special one, or 1 without any."""
    special = {*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values()}
    return next((i + 1 for i, token in enumerate(ids) if token in special), 1)
