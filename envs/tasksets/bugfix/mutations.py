"""One-token mutations of a small function, and consistent renaming of its variables."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

_TOKEN = re.compile(r"[A-Za-z_]+|[0-9]+|\*\*|//|==|!=|>=|<=|\+=|-=|\*=|'[^']*'|\S")
_SUBSTITUTES: dict[str, tuple[str, ...]] = {
    "+": ("-",),
    "-": ("+",),
    "*": ("+",),
    "/": ("*",),
    "//": ("%",),
    "%": ("//",),
    "+=": ("-=",),
    "-=": ("+=",),
    "*=": ("+=",),
    ">": ("<", ">="),
    "<": (">", "<="),
    ">=": (">", "<="),
    "<=": ("<", ">="),
    "==": ("!=",),
    "!=": ("==",),
    "and": ("or",),
    "or": ("and",),
    "True": ("False",),
    "False": ("True",),
    "min": ("max",),
    "max": ("min",),
    "sum": ("len",),
    "len": ("sum",),
}
_CALLABLE = ("min", "max", "sum", "len")
_SIGN_AFTER = ("return", "[", ":", "=", "(")
SPELLINGS: dict[str, tuple[str, ...]] = {
    "xs": ("xs", "items", "vals"),
    "ys": ("ys", "bs"),
    "x": ("x", "v"),
    "r": ("r", "out"),
    "t": ("t", "acc"),
    "i": ("i", "j"),
    "e": ("e", "z"),
    "u": ("u", "w"),
}
"""How a canonical variable name may be spelled in a task."""


@dataclass(frozen=True, slots=True)
class Token:
    """One source token of a line; ``start:end`` are its columns."""

    start: int
    end: int
    text: str


@dataclass(frozen=True, slots=True)
class Mutation:
    """Replace columns ``start:end`` of line ``line`` (from 0) by ``new``."""

    line: int
    start: int
    end: int
    new: str

    def apply(self, lines: Sequence[str]) -> list[str]:
        """The mutated lines."""
        result = list(lines)
        old = result[self.line]
        result[self.line] = old[: self.start] + self.new + old[self.end :]
        return result


def tokens(line: str) -> list[Token]:
    """The source tokens of a line."""
    return [Token(m.start(), m.end(), m.group()) for m in _TOKEN.finditer(line)]


def mutations(lines: Sequence[str]) -> list[Mutation]:
    """All one-token mutations of a function's body, in a fixed order."""
    found = []
    for number, line in enumerate(lines[1:], 1):
        found += [Mutation(number, t.start, t.end, new) for t, new in _substitutions(tokens(line))]
    return found


def _substitutions(line: list[Token]) -> list[tuple[Token, str]]:
    result = []
    for index, token in enumerate(line):
        before = line[index - 1].text if index else ""
        after = line[index + 1].text if index + 1 < len(line) else ""
        if token.text.isdigit() and int(token.text) <= 10:
            result += [(token, str(v)) for v in (int(token.text) + 1, int(token.text) - 1) if 0 <= v <= 9]
        elif token.text in _CALLABLE and after != "(":
            continue
        elif not (token.text == "-" and before in _SIGN_AFTER):
            result += [(token, new) for new in _SUBSTITUTES.get(token.text, ())]
    return result


def rename(lines: Sequence[str], spelling: dict[str, str]) -> list[str]:
    """The lines with every identifier token in ``spelling`` replaced."""
    result = []
    for line in lines:
        position, text = 0, ""
        for token in tokens(line):
            text += line[position : token.start] + spelling.get(token.text, token.text)
            position = token.end
        result.append(text + line[position:])
    return result


def random_spelling(rng: random.Random) -> dict[str, str]:
    """A spelling for each variable that has several."""
    return {name: rng.choice(choices) for name, choices in SPELLINGS.items()}


def first_difference(current: str, wanted: str) -> Mutation | None:
    """The first token of ``current`` that differs from ``wanted``, as the mutation (of line 0) that mends it.

    None when the lines are equal or do not have the same number of tokens.
    """
    have, want = tokens(current), tokens(wanted)
    if len(have) != len(want):
        return None
    for old, new in zip(have, want, strict=True):
        if old.text != new.text:
            return Mutation(0, old.start, old.end, new.text)
    return None


def unique_fragment(line: str, mutation: Mutation) -> tuple[str, str]:
    """A short piece of ``line`` around a mutation that occurs there first, and the piece after the mutation."""
    parts = tokens(line)
    at = next(i for i, token in enumerate(parts) if token.start == mutation.start)
    for left, right in ((0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1), (2, 2), (3, 2), (3, 3), (5, 5)):
        start = parts[max(0, at - left)].start
        end = parts[min(len(parts) - 1, at + right)].end
        if line.find(line[start:end]) == start:
            return line[start:end], line[start : mutation.start] + mutation.new + line[mutation.end : end]
    mended = line[: mutation.start] + mutation.new + line[mutation.end :]
    return line.strip(), mended.strip()
