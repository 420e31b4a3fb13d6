"""Python tests with other expectations: the literals that they compare with are replaced in place.

All else of the text stays as it is, byte for byte, so that code which looks at the tests cannot tell which they are.
"""

from __future__ import annotations

import ast
import random
import string
from collections.abc import Iterator

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
_WRAPPERS = {
    "approx",
    "set",
    "frozenset",
    "list",
    "tuple",
    "dict",
    "Decimal",
    "Fraction",
    "bytes",
    "complex",
    "param",
}
"""Calls of these with literals are literals."""
_ALIKE = (string.digits, string.ascii_lowercase, string.ascii_uppercase)
_TRIES = 16

Bindings = dict[str, list[ast.expr]]
"""Name -> the literals that it stands for, somewhere in the file."""


def altered(text: str, rng: random.Random) -> str:
    """A test file that expects other results; the text itself when it has no expectation that can be altered."""
    try:
        made = _Alteration(text, rng).apply()
        ast.parse(made)
    except (SyntaxError, ValueError, RecursionError):
        return text
    return made


def other_text(text: str, rng: random.Random) -> str:
    """The text with one of its letters or digits replaced by another of its kind; itself when it has none."""
    places = [place for place, letter in enumerate(text) if any(letter in kind for kind in _ALIKE)]
    if not places:
        return text
    place = rng.choice(places)
    kind = next(kind for kind in _ALIKE if text[place] in kind)
    return text[:place] + rng.choice(kind.replace(text[place], "")) + text[place + 1 :]


class _Alteration:
    """One file, and what is to be replaced in it."""

    def __init__(self, text: str, rng: random.Random):
        self._rng = rng
        self._data = text.encode()
        self._edits: dict[tuple[int, int], str] = {}
        """Start and end in the encoded text -> what goes there."""
        self._starts = [0]
        for line in self._data.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))
        tree = ast.parse(text)
        self._bound = _bindings(tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.Assert):
                self._alter_assert(node.test)
            elif isinstance(node, ast.Call):
                self._alter_call(node)
        if not self._edits:
            self._alter_comparisons(tree)

    def apply(self) -> str:
        data = self._data
        for (start, end), new in sorted(self._edits.items(), reverse=True):
            data = data[:start] + new.encode() + data[end:]
        return data.decode()

    def _alter_assert(self, test: ast.expr) -> None:
        is_negated = isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)
        compares = [] if is_negated else [node for node in ast.walk(test) if _operands(node)]
        for compare in compares:
            self._alter_operands(_operands(compare))
        if not compares:
            self._wrap(test, "not (", ")")

    def _alter_call(self, node: ast.Call) -> None:
        name = _name(node.func)
        if name in _RAISES and node.args:
            raised = self._text(node.args[0])
            self._edits[self._span(node.args[0])] = "BufferError" if raised != "BufferError" else "EOFError"
        elif name in _OPPOSITES:
            end = self._span(node.func)[1]
            self._edits[end - len(name), end] = _OPPOSITES[name]
        elif name in _EQUAL or (name.startswith("assert") and name.endswith("Equal")):
            self._alter_operands(node.args[:2])

    def _alter_comparisons(self, tree: ast.AST) -> None:
        """In a script without assertions, whatever is compared with a literal."""
        for node in ast.walk(tree):
            names = {child.id for child in ast.walk(node) if isinstance(child, ast.Name)}
            if not names & {"__name__", "argv", "sys"}:
                self._alter_leaves([operand for operand in _operands(node) if _is_literal(operand)])

    def _alter_operands(self, operands: list[ast.expr]) -> None:
        """Alter the side that is the expectation: a literal, a name for one, what has one, else any value."""
        literals = [operand for operand in operands if _is_literal(operand)]
        having = [operand for operand in reversed(operands) if any(_leaves(operand))]
        chosen = literals or self._named(operands) or having[:1]
        if chosen:
            self._alter_leaves(chosen)
        elif operands:
            self._wrap(operands[-1], "[", "]")

    def _named(self, operands: list[ast.expr]) -> list[ast.expr]:
        """What names among the operands stand for, unless the same is an argument on the other side as well."""
        found: list[ast.expr] = []
        for operand in operands:
            name = _root(operand)
            others = [node for other in operands if other is not operand for node in ast.walk(other)]
            if name and not any(ast.dump(node) == ast.dump(operand) for node in others):
                found += [_picked(operand, value) for value in self._bound.get(name, ())]
        return found

    def _alter_leaves(self, values: list[ast.expr]) -> None:
        for value in values:
            for leaf in _leaves(value):
                span = self._span(leaf)
                if span not in self._edits:
                    self._edits[span] = _other_literal(leaf, self._text(leaf), self._rng)

    def _wrap(self, node: ast.expr, before: str, after: str) -> None:
        start, end = self._span(node)
        self._edits |= {(start, start): before, (end, end): after}

    def _span(self, node: ast.expr) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        start = self._starts[node.lineno - 1] + node.col_offset
        return start, self._starts[node.end_lineno - 1] + node.end_col_offset

    def _text(self, node: ast.expr) -> str:
        start, end = self._span(node)
        return self._data[start:end].decode()


def _operands(node: ast.AST) -> list[ast.expr]:
    """Both sides of a comparison that says what is expected; ``!=`` and ``<`` say too little for that."""
    if not isinstance(node, ast.Compare):
        return []
    expects = all(isinstance(operator, ast.Eq | ast.Is | ast.In) for operator in node.ops)
    return [node.left, *node.comparators] if expects else []


def _name(function: ast.expr) -> str:
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def _root(node: ast.expr) -> str:
    """The variable that ``x``, ``x[0]`` or ``x.y`` begins with."""
    while isinstance(node, ast.Subscript | ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def _picked(operand: ast.expr, value: ast.expr) -> ast.expr:
    """The part of a literal that ``operand`` takes by a constant index; all of it when it does not."""
    if isinstance(operand, ast.Subscript) and isinstance(operand.slice, ast.Constant):
        wanted = operand.slice.value
        if isinstance(value, ast.Dict):
            for key, part in zip(value.keys, value.values, strict=True):
                if isinstance(key, ast.Constant) and key.value == wanted:
                    return part
        elif isinstance(value, ast.List | ast.Tuple) and type(wanted) is int and wanted < len(value.elts):
            return value.elts[wanted]
    return value


def _is_literal(node: ast.expr) -> bool:
    """Whether it is data alone, or data in a call that only wraps it."""
    if isinstance(node, ast.Call):
        return _name(node.func) in _WRAPPERS and bool(node.args) and all(map(_is_literal, node.args))
    if isinstance(node, ast.UnaryOp):
        return not isinstance(node.op, ast.Not) and _is_literal(node.operand)
    if isinstance(node, ast.Constant | ast.BinOp | ast.List | ast.Tuple | ast.Set | ast.Dict):
        children = [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr)]
        return all(map(_is_literal, children))
    return False


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


def _other_literal(node: ast.expr, text: str, rng: random.Random) -> str:
    """Source of a value of the same kind, but another one."""
    if not isinstance(node, ast.Constant):
        return {ast.List: "[0]", ast.Tuple: "(0,)"}.get(type(node), "{0: 0}")
    value = node.value
    if isinstance(value, bool):
        return str(not value)
    if isinstance(value, int):
        return str(value + rng.randint(1, 3))
    if isinstance(value, float | complex):
        return repr(value + rng.randint(1, 3))
    if isinstance(value, str | bytes):
        return _other_string(value, text, rng)
    return "..." if value is None else "None"


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


def _bindings(tree: ast.AST) -> Bindings:
    """What names stand for by assignments, loops over literals, and parametrized tests."""
    found: Bindings = {}
    nodes = list(ast.walk(tree))
    for node in nodes:
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and _is_literal(node.value):
            _bind(node.targets[0], node.value, found)
        elif isinstance(node, ast.AnnAssign) and node.value is not None and _is_literal(node.value):
            _bind(node.target, node.value, found)
    assigned = {name: list(values) for name, values in found.items()}
    for node in nodes:
        if isinstance(node, ast.For | ast.comprehension):
            for row in _rows(node.iter, assigned):
                _bind(node.target, row, found)
        elif isinstance(node, ast.Call) and _name(node.func) == "parametrize" and len(node.args) > 1:
            target = _parameters(node.args[0])
            for row in _rows(node.args[1], assigned):
                _bind(target, row, found)
    return found


def _bind(target: ast.expr, value: ast.expr, found: Bindings) -> None:
    if isinstance(target, ast.Name):
        found.setdefault(target.id, []).append(value)
    elif isinstance(target, ast.Tuple | ast.List):
        is_row = isinstance(value, ast.Call) and _name(value.func) == "param"
        parts = value.args if isinstance(value, ast.Call) and is_row else getattr(value, "elts", [])
        for part_target, part in zip(target.elts, parts, strict=False):
            _bind(part_target, part, found)


def _rows(values: ast.expr, assigned: Bindings) -> list[ast.expr]:
    """What a loop over ``values`` goes through, as far as that is written in the file."""
    if isinstance(values, ast.Name):
        return [row for value in assigned.get(values.id, ()) for row in _rows(value, {})]
    if (
        isinstance(values, ast.Call)
        and _name(values.func) == "items"
        and isinstance(values.func, ast.Attribute)
    ):
        return _items(values.func.value, assigned)
    return list(values.elts) if isinstance(values, ast.List | ast.Tuple | ast.Set) else []


def _items(mapping: ast.expr, assigned: Bindings) -> list[ast.expr]:
    found = [mapping] if isinstance(mapping, ast.Dict) else assigned.get(_root(mapping), [])
    return [
        ast.Tuple(elts=[key, value], ctx=ast.Load())
        for each in found
        if isinstance(each, ast.Dict)
        for key, value in zip(each.keys, each.values, strict=True)
        if key is not None
    ]


def _parameters(names: ast.expr) -> ast.expr:
    """The argument names of a parametrized test, as the target of a loop."""
    if isinstance(names, ast.List | ast.Tuple):
        texts = [str(name.value) for name in names.elts if isinstance(name, ast.Constant)]
    else:
        texts = str(names.value).split(",") if isinstance(names, ast.Constant) else []
    targets: list[ast.expr] = [ast.Name(id=text.strip(), ctx=ast.Store()) for text in texts]
    is_single = len(targets) == 1 and isinstance(names, ast.Constant) and "," not in str(names.value)
    return targets[0] if is_single else ast.Tuple(elts=targets, ctx=ast.Store())
