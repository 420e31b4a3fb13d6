"""The functions of the bugfix set: 78 hand-written ones, and compositional ones (predicate x loop x transform).

Every function is small, pure, free of ``while`` and of recursion, so that it and each of its one-token
mutants terminates; they are our own code and may run in this process to compute expectations.
"""

from __future__ import annotations

import copy
import random
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import Any

HELD_OUT_SHARE = 0.12
_HELD_OUT_SEED = 5
_BUILTINS: dict[str, Any] = {
    f.__name__: f
    for f in (abs, all, any, bool, enumerate, float, int, len, list, max, min, range, reversed, round, set)
} | {f.__name__: f for f in (sorted, str, sum, zip)}


@dataclass(frozen=True, slots=True)
class Function:
    """One correct function, with what it should do in a few words and the inputs of its tests."""

    key: str
    """Unique, readable part of the task ids."""
    name: str
    intent: str
    lines: tuple[str, ...]
    inputs: tuple[tuple[Any, ...], ...]
    held_out: bool


def run(source: str, name: str, inputs: tuple[tuple[Any, ...], ...]) -> tuple[Any, ...]:
    """What ``name`` of trusted ``source`` gives for each input: ``("ok", value)`` or ``("error", type name)``."""
    scope: dict[str, Any] = {"__builtins__": _BUILTINS}
    exec(compile(source, "solution.py", "exec"), scope)
    results: list[tuple[str, Any]] = []
    for arguments in inputs:
        try:
            results.append(("ok", scope[name](*copy.deepcopy(arguments))))
        except Exception as error:  # noqa: BLE001 - whatever a mutant raises is its result
            results.append(("error", type(error).__name__))
    return tuple(results)


def all_functions() -> list[Function]:
    """Every function of the set, in a fixed order."""
    rng = random.Random(_HELD_OUT_SEED)
    functions = list(_hand_written())
    for intent, source, inputs in _compositional():
        functions.append(_function(intent, source, inputs, held_out=rng.random() < HELD_OUT_SHARE))
    keys = [function.key for function in functions]
    if len(set(keys)) != len(keys):
        raise ValueError("two functions of the bugfix set have the same intent")
    seen = {_code(function) for function in functions if not function.held_out}
    return [replace(f, held_out=f.held_out and _code(f) not in seen) for f in functions]


def _code(function: Function) -> str:
    """What a function does, whatever it is called: one that training sees under another name is not held out."""
    return "\n".join(function.lines).partition("(")[2]


def _function(intent: str, source: str, inputs: Any, *, held_out: bool) -> Function:
    match = re.match(r"def (\w+)", source)
    if match is None:
        raise ValueError(f"not a function: {source[:40]!r}")
    key = re.sub(r"[^a-z0-9]+", "-", _spell(f"{match[1]} {intent}".lower())).strip("-")
    return Function(key, match[1], intent, tuple(source.split("\n")), tuple(map(tuple, inputs)), held_out)


def _spell(text: str) -> str:
    return text.replace("-1", "minus one")


def _hand_written() -> Iterator[Function]:
    table = tomllib.loads(files(__package__).joinpath("functions.toml").read_text(encoding="utf-8"))
    for row in table["function"]:
        source = row["source"].strip("\n")
        yield _function(row["intent"], source, row["inputs"], held_out=row.get("held_out", False))


# A predicate is (words, condition on {v}, extra parameters).
_PREDICATES = (
    ("above k", "{v} > k", "k"),
    ("below k", "{v} < k", "k"),
    ("at least k", "{v} >= k", "k"),
    ("at most k", "{v} <= k", "k"),
    ("equal to k", "{v} == k", "k"),
    ("not k", "{v} != k", "k"),
    ("even", "{v} % 2 == 0", ""),
    ("odd", "{v} % 2 == 1", ""),
    ("positive", "{v} > 0", ""),
    ("negative", "{v} < 0", ""),
    ("multiple of 3", "{v} % 3 == 0", ""),
    ("between a and b", "{v} >= a and {v} <= b", "ab"),
    ("outside a and b", "{v} < a or {v} > b", "ab"),
    ("over 4", "{v} > 4", ""),
    ("under 5", "{v} < 5", ""),
)
_TRANSFORMS = (
    ("items", "x"),
    ("squares", "x * x"),
    ("doubles", "x * 2"),
    ("halves", "x // 2"),
    ("next", "x + 1"),
    ("previous", "x - 1"),
    ("triples", "x * 3"),
    ("remainders by 3", "x % 3"),
)
_IN_PRODUCTS = ("items", "next", "doubles")
_OPERATIONS = (("plus", "+"), ("minus", "-"), ("times", "*"))
_LISTS: tuple[list[int], ...] = (
    [1, 2, 3, 4],
    [5, -2, 7, 0, 3],
    [2, 2, 9],
    [-4, 6],
    [3, 1, 4, 1, 5, 9, 6],
    [],
    [8, 3],
)
_LIMITS = (2, 3, 2, 0, 4, 1, 5)
_RANGES = ((2, 3), (0, 5), (2, 9), (0, 4), (2, 4), (1, 2), (3, 7))
_NUMBERS = ((1, 2), (3, 4), (0, 5), (7, 3), (-2, 3))
_CHOICES = ((1, 2), (3, 3), (5, 2), (-1, 4), (4, 4), (6, 1))

_PARAMETERS = {"": "xs", "k": "xs, k", "ab": "xs, a, b"}
_INPUTS: dict[str, list[tuple[Any, ...]]] = {
    "": [(xs,) for xs in _LISTS],
    "k": [(xs, k) for xs, k in zip(_LISTS, _LIMITS, strict=True)],
    "ab": [(xs, a, b) for xs, (a, b) in zip(_LISTS, _RANGES, strict=True)],
}


def _compositional() -> Iterator[tuple[str, str, Any]]:
    for words, condition, extra in _PREDICATES:
        for intent, source in _list_functions(words, condition, _PARAMETERS[extra]):
            yield intent, source, _INPUTS[extra]
    yield from _arithmetic()
    yield from _conditional()


def _list_functions(words: str, condition: str, parameters: str) -> Iterator[tuple[str, str]]:
    of_x, of_item = condition.format(v="x"), condition.format(v="xs[i]")
    loop = "    for x in xs:\n"
    yield (
        f"count the {words} items",
        f"def count({parameters}):\n    t = 0\n{loop}        if {of_x}:\n            t += 1\n    return t",
    )
    yield (
        f"is any item {words}",
        f"def any_item({parameters}):\n{loop}        if {of_x}:\n            return True\n    return False",
    )
    yield (
        f"are all items {words}",
        f"def all_items({parameters}):\n{loop}        if not ({of_x}):\n            return False\n    return True",
    )
    yield (
        f"first {words} item or -1",
        f"def first_item({parameters}):\n{loop}        if {of_x}:\n            return x\n    return -1",
    )
    yield (
        f"position of the first {words} item or -1",
        f"def find({parameters}):\n    for i in range(len(xs)):\n        if {of_item}:\n"
        f"            return i\n    return -1",
    )
    for what, value in _TRANSFORMS:
        yield (
            f"sum of {what} of {words} items",
            f"def total({parameters}):\n    t = 0\n{loop}        if {of_x}:\n"
            f"            t += {value}\n    return t",
        )
        yield (
            f"list {what} of {words} items",
            f"def pick({parameters}):\n    return [{value} for x in xs if {of_x}]",
        )
        if what in _IN_PRODUCTS:
            yield (
                f"product of {what} of {words} items",
                f"def product({parameters}):\n    t = 1\n{loop}        if {of_x}:\n"
                f"            t *= {value}\n    return t",
            )


def _arithmetic() -> Iterator[tuple[str, str, Any]]:
    for word1, op1 in _OPERATIONS:
        for word2, op2 in _OPERATIONS:
            for k in (1, 2, 3, 4):
                calc = "def calc(a, b):\n    return a"
                yield f"a {word1} b {word2} {k}", f"{calc} {op1} b {op2} {k}", _NUMBERS
                yield f"a {word1} {k} {word2} b", f"{calc} {op1} {k} {op2} b", _NUMBERS


def _conditional() -> Iterator[tuple[str, str, Any]]:
    for words, condition, _ in _PREDICATES[:6]:
        for word1, op1 in _OPERATIONS:
            for word2, op2 in _OPERATIONS:
                if op1 != op2:
                    yield (
                        f"if a is {words} a {word1} k else a {word2} k",
                        f"def choose(a, k):\n    if {condition.format(v='a')}:\n        return a {op1} k\n"
                        f"    return a {op2} k",
                        _CHOICES,
                    )
