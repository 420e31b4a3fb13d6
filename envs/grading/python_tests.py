"""Where Python tests say what they expect, and other literals that could stand there.

Nothing else of a file's text changes, and what comes in looks like what was there: as a rule it is what another test
of the file expects. So code that looks at the tests cannot tell the altered ones from the rest.
"""

from __future__ import annotations

import ast
import builtins
import random
import string
from collections.abc import Iterator, Sequence

from hintloop.envs.grading.bindings import bindings, is_literal, name_of, picked, root_of

Span = tuple[int, int]
Way = dict[Span, str]
"""Start and end in the text -> what goes there: one way to make a test expect something else."""

_OPPOSITES = {
    "assertTrue": "assertFalse",
    "assertIsNone": "assertIsNotNone",
    "assertIsInstance": "assertNotIsInstance",
    "assertNotEqual": "assertEqual",
    "assertNotIn": "assertIn",
    "assertGreater": "assertLessEqual",
    "assertGreaterEqual": "assertLess",
}
_OPPOSITES |= {
    opposite: name for name, opposite in _OPPOSITES.items() if opposite not in ("assertEqual", "assertIn")
}
_EQUAL = {
    "assertIs",
    "assertIn",
    "assert_equal",
    "assert_array_equal",
    "assert_allclose",
    "assert_almost_equal",
}
_RAISES = {"raises", "assertRaises", "assertRaisesRegex"}
_ERRORS = ("ValueError", "TypeError", "KeyError", "IndexError", "ZeroDivisionError")
_ALIKE = (string.digits, string.ascii_lowercase, string.ascii_uppercase)
_TRIES = 16


def ways(text: str, rng: random.Random, *, alike: bool = True) -> list[list[Way]]:
    """For each test of a file the ways to alter it; a row of a table of cases counts as a test of its own.

    ``alike``: what comes in is, if possible, what another test expects. Empty for a file that is not Python.
    """
    try:
        return _Expectations(text, rng).ways(alike)
    except (SyntaxError, ValueError, RecursionError):
        return []


def other_text(text: str, rng: random.Random) -> str:
    """The text with one of its letters or digits replaced by another of its kind; itself when it has none."""
    places = [place for place, letter in enumerate(text) if any(letter in kind for kind in _ALIKE)]
    if not places:
        return text
    place = rng.choice(places)
    kind = next(kind for kind in _ALIKE if text[place] in kind)
    return text[:place] + rng.choice(kind.replace(text[place], "")) + text[place + 1 :]


_Change = tuple[Span, ast.expr | str]
"""A place, and what goes there: a text, or another literal than this."""


class _Expectations:
    """What the tests of one file expect."""

    def __init__(self, text: str, rng: random.Random):
        self._rng = rng
        self._source = text
        self._lines = text.encode().splitlines(keepends=True)
        self._starts = [0]
        for line in self._lines:
            self._starts.append(self._starts[-1] + len(line.decode()))
        tree = ast.parse(text)
        self._bound = bindings(tree)
        self._bodies = [self._body(node) for node in _functions(tree)]
        self._found: dict[Span, list[list[_Change]]] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Assert):
                self._take_assert(node.test)
            elif isinstance(node, ast.Call):
                self._take_call(node)
        if not self._found:
            self._take_comparisons(tree)

    def ways(self, alike: bool) -> list[list[Way]]:
        """See ``ways``."""
        changes = [change for test in self._found.values() for way in test for change in way]
        leaves = {span: node for span, node in changes if isinstance(node, ast.Constant)}
        texts = [(self._text(node), node.value) for node in leaves.values()]
        others = [(text, value) for text, value in texts if alike and "\n" not in text]
        return [[self._way(way, others) for way in test] for test in self._found.values()]

    def _way(self, changes: list[_Change], others: Sequence[tuple[str, object]]) -> Way:
        return {
            span: new if isinstance(new, str) else _other_literal(new, self._text(new), others, self._rng)
            for span, new in changes
        }

    def _take_assert(self, test: ast.expr) -> None:
        is_negated = isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)
        compares = [] if is_negated else [node for node in ast.walk(test) if _operands(node)]
        choices = [self._choices(_operands(node), _is_search(node)) for node in compares]
        if not compares:
            self._add(test, self._wrapped(test, "not (", ")"))
        elif len(choices) == 1:
            for node, way in choices[0]:
                self._add(node, way)
        else:  # one of several may be enough for the assertion to hold
            self._add(test, [change for found in choices if found for change in self._rng.choice(found)[1]])

    def _take_call(self, node: ast.Call) -> None:
        name = name_of(node.func)
        if name in _RAISES and node.args:
            raised = self._text(node.args[0])
            errors = [error for error in _ERRORS if error not in raised and not _covers(error, raised)]
            self._add(node, [(self._span(node.args[0]), self._rng.choice(errors or ["EOFError"]))])
        elif name in _OPPOSITES:
            end = self._span(node.func)[1]
            self._add(node, [((end - len(name), end), _OPPOSITES[name])])
        elif name in _EQUAL or (name.startswith("assert") and name.endswith("Equal")):
            for place, way in self._choices(node.args[:2], name == "assertIn"):
                self._add(place, way)

    def _take_comparisons(self, tree: ast.AST) -> None:
        """In a script without assertions, whatever is compared with a literal."""
        for node in ast.walk(tree):
            names = {child.id for child in ast.walk(node) if isinstance(child, ast.Name)}
            if not names & {"__name__", "argv", "sys"}:
                literals = [operand for operand in _operands(node) if is_literal(operand)]
                for place, way in self._leaf_ways(literals):
                    self._add(place, way)

    def _choices(self, operands: list[ast.expr], search: bool) -> list[tuple[ast.expr, list[_Change]]]:
        """Ways to alter the side that is the expectation: a literal, a name for one, what has one, else any value.

        Of what is searched, every part is altered at once.
        """
        literals = [operand for operand in operands if is_literal(operand)]
        having = [operand for operand in reversed(operands) if any(_leaves(operand))]
        found = self._leaf_ways(literals or self._named(operands) or having[:1])
        if search and found:
            return [(found[0][0], [change for _, way in found for change in way])]
        if not found and operands:
            return [(operands[-1], self._wrapped(operands[-1], "[", "]"))]
        return found

    def _named(self, operands: list[ast.expr]) -> list[ast.expr]:
        """What names among the operands stand for, unless the same is an argument on the other side as well."""
        found: list[ast.expr] = []
        for operand in operands:
            name = root_of(operand)
            others = [node for other in operands if other is not operand for node in ast.walk(other)]
            if name and not any(ast.dump(node) == ast.dump(operand) for node in others):
                found += [picked(operand, value) for value in self._bound.get(name, ())]
        return found

    def _leaf_ways(self, values: list[ast.expr]) -> list[tuple[ast.expr, list[_Change]]]:
        return [(value, [(self._span(leaf), leaf)]) for value in values for leaf in _leaves(value)]

    def _wrapped(self, node: ast.expr, before: str, after: str) -> list[_Change]:
        start, end = self._span(node)
        return [((start, start), before), ((end, end), after)]

    def _add(self, place: ast.expr, way: list[_Change]) -> None:
        """Take a way to alter the test that ``place`` is in."""
        start, end = self._span(place)
        within = (body for body in self._bodies if body[0] <= start < body[1])
        ways = self._found.setdefault(next(within, (start, end)), [])
        if way and way not in ways:
            ways.append(way)

    def _body(self, function: ast.FunctionDef | ast.AsyncFunctionDef) -> Span:
        last = function.body[-1]
        assert last.end_lineno is not None
        return self._starts[function.body[0].lineno - 1], self._starts[last.end_lineno]

    def _span(self, node: ast.expr) -> Span:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self._place(node.lineno, node.col_offset), self._place(node.end_lineno, node.end_col_offset)

    def _place(self, line: int, column: int) -> int:
        return self._starts[line - 1] + len(self._lines[line - 1][:column].decode())

    def _text(self, node: ast.expr) -> str:
        start, end = self._span(node)
        return self._source[start:end]


def _functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Those of a module and of its classes, but not those within others."""
    nodes: list[ast.stmt] = list(tree.body)
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node
        elif isinstance(node, ast.ClassDef):
            nodes += node.body


def _covers(error: str, raised: str) -> bool:
    """Whether who expects ``error`` is content with ``raised`` too, as far as both are Python's own."""
    kind, other = getattr(builtins, error), getattr(builtins, raised, None)
    return isinstance(other, type) and issubclass(other, kind)


def _is_search(node: ast.AST) -> bool:
    return isinstance(node, ast.Compare) and any(isinstance(operator, ast.In) for operator in node.ops)


def _operands(node: ast.AST) -> list[ast.expr]:
    """Both sides of a comparison that says what is expected; ``!=`` and ``<`` say too little for that."""
    if not isinstance(node, ast.Compare):
        return []
    expects = all(isinstance(operator, ast.Eq | ast.Is | ast.In) for operator in node.ops)
    return [node.left, *node.comparators] if expects else []


def _leaves(node: ast.expr) -> Iterator[ast.expr]:
    """Constants and empty containers, all the way down; not those of formatted strings, which have no place."""
    if isinstance(node, ast.Subscript):
        node = node.value
    children = [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr)]
    if isinstance(node, ast.Constant | ast.List | ast.Tuple | ast.Dict) and not children:
        yield node
    elif not isinstance(node, ast.JoinedStr):
        for child in children:
            yield from _leaves(child)


def _other_literal(
    node: ast.expr, text: str, others: Sequence[tuple[str, object]], rng: random.Random
) -> str:
    """Source of a value of the same kind, but another one: if possible one of ``others`` (source and value).

    Without any, a number is one far off.
    """
    if not isinstance(node, ast.Constant):
        return {ast.List: "[0]", ast.Tuple: "(0,)"}.get(type(node), "{0: 0}")
    value = node.value
    if isinstance(value, bool):
        return str(not value)
    if value is None or value is ...:
        return rng.choice([other for other, found in others if found is not value] or ["0"])
    alike = [other for other, found in others if type(found) is type(value) and found != value]
    if alike and (isinstance(value, str | bytes) or rng.random() < 0.5):
        return rng.choice(alike)
    if isinstance(value, str | bytes):
        return _other_string(value, text, rng)
    step = rng.randint(1, 3) if others else rng.randint(1000, 9999)
    is_large = not isinstance(value, complex) and value >= step
    return repr(value - step if is_large and rng.random() < 0.5 else value + step)


def _other_string(value: str | bytes, text: str, rng: random.Random) -> str:
    quote = min(place for place in (text.find("'"), text.find('"')) if place >= 0)
    for _ in range(_TRIES):
        made = text[:quote] + other_text(text[quote:], rng)
        try:
            if ast.literal_eval(made) != value:
                return made
        except (SyntaxError, ValueError):  # it was part of an escape
            continue
    return repr(value + "x" if isinstance(value, str) else value + b"x")
