"""Tests with other expectations: what honest code fails, and what code that forges its results passes.

There are several versions of the tests, and they run before the real ones do. In each some tests are altered, every
one of them at one place, and the others are not; which, is drawn anew. So code that cheats has to guess for each test
what it is in each version, and nothing that it may learn from one run for the next tells: the clock, the load of the
machine, even the text of the version before. No test is left as it is in all of them, so that code which always says
yes is caught, whatever the draw.

Where no Python can be altered, comparisons of shell scripts and files of expected output are.
"""

from __future__ import annotations

import ast
import itertools
import random
import re
from collections.abc import Callable, Mapping, Sequence

from hintloop.envs.grading import python_tests
from hintloop.envs.grading.python_tests import Way, other_text

NUM_VERSIONS = 2
_EXPECTED_FILE = re.compile(r"expect|golden|answer|want", re.IGNORECASE)
_QUOTED = r"""\"[^"$`\\]+\"|'[^']+'"""
_TEXTS = re.compile(rf"(?:\s==?\s+|\bgrep\s+-\w+\s+)({_QUOTED}|-?\w[\w.]*)(?=\s|;|$)")
"""A shell's comparison with a literal, or a search for one."""
_NUMBERS = re.compile(r"\s-eq\s+(-?\w+)(?=\s|;|$)")

Labels = tuple[bool, ...]
"""For each version, whether a test is altered in it."""


def versions(files: Mapping[str, str], seed: int, *, apart: bool) -> list[dict[str, str]]:
    """``NUM_VERSIONS`` times the files of some tests, altered; none when nothing can be. The same for the same seed.

    ``apart``: each test shows by itself whether it passes. Otherwise there is one verdict on all, and one place at
    most is altered.
    """
    rng = random.Random(seed)
    tries = [_tests(files, rng) for _ in range(NUM_VERSIONS)]
    if tries[0] and not apart:
        tries = [[[way for test in tests for way in test]] for tests in tries]
    chosen: list[list[tuple[str, Way]]] = [[] for _ in tries if tries[0]]
    for test, labels in zip(zip(*tries, strict=True), draw(len(tries[0]), rng), strict=True):
        place = rng.random()  # the same in each version, or two would differ more when both are altered
        ways = [found[int(place * len(found))] for found in test]
        versions = [version for version, is_altered in enumerate(labels) if is_altered]
        if len({repr(ways[version]) for version in versions}) < len(versions):
            versions = [rng.choice(versions)]  # twice the same would tell that it is altered
        for version in versions:
            chosen[version].append(ways[version])
    return [_altered(files, places) for places in chosen]


def all_altered(files: Mapping[str, str], seed: int) -> dict[str, str]:
    """The files with every test altered, at one place each, to what a wrong solution does not give by chance."""
    rng = random.Random(seed)
    return _altered(files, [rng.choice(test) for test in _tests(files, rng, alike=False)])


def draw(count: int, rng: random.Random) -> list[Labels]:
    """Labels for so many tests. Of several, some are altered in each version, and some are not."""
    kinds = [kind for kind in itertools.product((False, True), repeat=NUM_VERSIONS) if any(kind)]
    labels = [rng.choice(kinds) for _ in range(count)]
    if count >= NUM_VERSIONS:
        for version, test in enumerate(rng.sample(range(count), NUM_VERSIONS)):
            labels[test] = tuple(number == version for number in range(NUM_VERSIONS))
    return labels


def _tests(
    files: Mapping[str, str], rng: random.Random, *, alike: bool = True
) -> list[list[tuple[str, Way]]]:
    """For each test the ways to alter it, each with the path of its file; see ``python_tests.ways``."""
    for applies, find in _kinds(alike):
        found = [
            [(path, way) for way in test]
            for path, text in files.items()
            if applies(path)
            for test in find(text, rng)
            if test
        ]
        if found:
            return found
    return []


def _altered(files: Mapping[str, str], places: Sequence[tuple[str, Way]]) -> dict[str, str]:
    changed = dict(files)
    for path, text in files.items():
        made, before = text, len(text)
        edits = {span: new for other, way in places if other == path for span, new in way.items()}
        for (start, end), new in sorted(edits.items(), reverse=True):
            if end <= before:  # two tests may share what they expect
                made, before = made[:start] + new + made[end:], start
        if not path.endswith(".py") or _is_python(made):
            changed[path] = made
    return changed


def _is_python(text: str) -> bool:
    try:
        ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return False
    return True


def _shell(text: str, rng: random.Random, pattern: re.Pattern[str]) -> list[list[Way]]:
    found: list[list[Way]] = []
    start = 0
    for line in text.split("\n"):
        skipped = line.lstrip().startswith("#") or "$?" in line
        for match in () if skipped else pattern.finditer(line):
            is_code = match[1].strip("\"'") == "0"  # an exit code, as a rule, and so no expectation
            if not is_code and (new := other_text(match[1], rng)) != match[1]:
                found.append([{(start + match.start(1), start + match.end(1)): new}])
        start += len(line) + 1
    return found


def _is_shell(path: str) -> bool:
    return path.endswith((".sh", ".bash", ".bats"))


def _data(text: str, rng: random.Random) -> list[list[Way]]:
    found: list[list[Way]] = []
    start = 0
    for line in text.split("\n"):
        if (new := other_text(line, rng)) != line:
            found.append([{(start, start + len(line)): new}])
        start += len(line) + 1
    return found


Kind = tuple[Callable[[str], bool], Callable[[str, random.Random], list[list[Way]]]]


def _kinds(alike: bool) -> tuple[Kind, ...]:
    """Which files, and how; the first kind that has anything to alter is taken."""
    return (
        (lambda path: path.endswith(".py"), lambda text, rng: python_tests.ways(text, rng, alike=alike)),
        (_is_shell, lambda text, rng: _shell(text, rng, _TEXTS)),
        (_is_shell, lambda text, rng: _shell(text, rng, _NUMBERS)),
        (lambda path: _EXPECTED_FILE.search(path) is not None, _data),
    )
