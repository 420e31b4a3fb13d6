"""Plain ``unittest`` files: as a check of one function, or cut to their first tests."""

from __future__ import annotations

import ast
import builtins
from typing import TypeGuard

from hintloop.envs.task import AssertTests
from hintloop.envs.tasksets.sources import parse

_RAISED = """
class Raised:
    def __init__(self, call):
        self.exception = None
        try:
            call()
        except Exception as error:
            self.exception = error
"""
_COMPARED = {
    "assertEqual": ast.Eq,
    "assertNotEqual": ast.NotEq,
    "assertMultiLineEqual": ast.Eq,
    "assertDictEqual": ast.Eq,
    "assertListEqual": ast.Eq,
    "assertIs": ast.Is,
    "assertIn": ast.In,
    "assertNotIn": ast.NotIn,
}
_MAKERS = frozenset({"dict", "float", "int", "list", "range", "set", "str", "tuple", "type"})
_CALLABLE = _MAKERS | {"abs", "len", "max", "min", "sorted", "sum"}
"""Builtin functions that a test may call."""


class _Unsuited(Exception):
    """The file has something that a check cannot have."""


def convert(source: str, path: str, num_visible: int) -> AssertTests | None:
    """A check with the same assertions; None unless they only compare what one function gives for plain data.

    The visible check has the first tests, at most ``num_visible`` and a third of all. Skipped tests are left out.
    """
    try:
        function, methods = _parts(parse(source), path)
        bodies = [_Method(function).body(method) for method in methods]
    except _Unsuited:
        return None
    num_shown = min(num_visible, max(1, len(bodies) // 3))
    return AssertTests(path, function, _check(function, bodies[:num_shown]), _check(function, bodies))


def first_tests(source: str, count: int) -> str | None:
    """The file with its first tests only: at most ``count`` and a third of all; None when that is none."""
    classes = [node for node in parse(source).body if isinstance(node, ast.ClassDef)]
    methods = [node for made in classes for node in made.body if _is_test(node)]
    kept = methods[: min(count, len(methods) // 3)]
    if not kept:
        return None
    lines = source.split("\n")
    for made in reversed(classes):
        cut: list[ast.FunctionDef | ast.ClassDef] = [
            node for node in made.body if _is_test(node) and node not in kept
        ]
        for node in reversed(cut if len(cut) < len(made.body) else [made]):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            del lines[first - 1 : node.end_lineno]
    return "\n".join(lines).rstrip() + "\n"


def _is_test(node: ast.stmt) -> TypeGuard[ast.FunctionDef]:
    return isinstance(node, ast.FunctionDef) and node.name.startswith("test")


def _parts(tree: ast.Module, path: str) -> tuple[str, list[ast.FunctionDef]]:
    """The name of the function, and all test methods."""
    module = path.removesuffix(".py").replace("/", ".")
    names: list[str] = []
    methods: list[ast.FunctionDef] = []
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module == module:
            names += [found.name if found.asname is None else "" for found in node.names]
        elif isinstance(node, ast.ClassDef):
            methods += _methods(node)
        elif not (_imports_unittest(node) or isinstance(node, ast.If)):  # if __name__ == "__main__"
            raise _Unsuited
    if len(names) != 1 or not names[0] or not methods:
        raise _Unsuited
    return names[0], methods


def _imports_unittest(node: ast.stmt) -> bool:
    return isinstance(node, ast.Import) and [found.name for found in node.names] == ["unittest"]


def _methods(made: ast.ClassDef) -> list[ast.FunctionDef]:
    found = []
    for node in made.body:
        if not _is_test(node):
            raise _Unsuited
        if not node.decorator_list:
            found.append(node)
        elif "skip" not in ast.unparse(node.decorator_list[0]):
            raise _Unsuited
    return found


class _Method:
    """Turns the statements of one test method into those of a check."""

    def __init__(self, function: str) -> None:
        self._callable = {function, *_CALLABLE}
        self._known: set[str] = set()
        self._errors: set[str] = set()

    def body(self, method: ast.FunctionDef) -> list[str]:
        """The statements; raises ``_Unsuited``."""
        statements = method.body[1:] if ast.get_docstring(method) is not None else method.body
        return [line for statement in statements for line in self._statement(statement)]

    def _statement(self, node: ast.stmt) -> list[str]:
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            text = f"{node.targets[0].id} = {self._expression(node.value)}"
            self._known.add(node.targets[0].id)
            return [text]
        if isinstance(node, ast.With):
            return self._raises(node)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            return [self._assertion(node.value)]
        raise _Unsuited

    def _assertion(self, call: ast.Call) -> str:
        name, arguments = _of_self(call), call.args
        if name in _COMPARED and len(arguments) in (2, 3):
            left, right = arguments[0], arguments[1]
            self._expression(left)
            self._expression(right)
            return f"assert {ast.unparse(ast.Compare(left, [_COMPARED[name]()], [right]))}"
        if name in ("assertTrue", "assertFalse", "assertIsNone", "assertIsNotNone") and arguments:
            text = f"({self._expression(arguments[0])})"
            form = {"assertTrue": "{}", "assertFalse": "not {}", "assertIsNone": "{} is None"}
            return f"assert {form.get(name, '{} is not None').format(text)}"
        if name == "assertCountEqual" and len(arguments) == 2:
            left_text, right_text = (self._expression(argument) for argument in arguments)
            return f"assert sorted({left_text}, key=repr) == sorted({right_text}, key=repr)"
        raise _Unsuited

    def _raises(self, node: ast.With) -> list[str]:
        """``with self.assertRaises(X) as err: f(...)``"""
        item = node.items[0]
        call, target = item.context_expr, item.optional_vars
        if len(node.items) != 1 or not isinstance(call, ast.Call) or _of_self(call) != "assertRaises":
            raise _Unsuited
        name = ast.unparse(call.args[0])
        if not _is_exception(name) or len(node.body) != 1 or not isinstance(node.body[0], ast.Expr):
            raise _Unsuited
        text = self._expression(node.body[0].value)
        error = target.id if isinstance(target, ast.Name) else "error"
        self._errors.add(error)
        self._known.add(error)
        return [f"{error} = Raised(lambda: {text})", f"assert isinstance({error}.exception, {name})"]

    def _expression(self, node: ast.expr) -> str:
        """The text of an expression of literals, variables, and calls of functions that are known here."""
        called = [part.func for part in ast.walk(node) if isinstance(part, ast.Call)]
        for part in ast.walk(node):
            if isinstance(part, ast.Lambda | ast.comprehension | ast.keyword | ast.Starred | ast.NamedExpr):
                raise _Unsuited
            if isinstance(part, ast.Name) and not _is_exception(part.id):
                known = self._callable if part in called else self._known
                if part.id not in known:
                    raise _Unsuited
            if isinstance(part, ast.Attribute) and not self._is_plain(part):
                raise _Unsuited
        return ast.unparse(node)

    def _is_plain(self, node: ast.Attribute) -> bool:
        """A method of a literal, or something of an exception that was caught."""
        root: ast.expr = node
        while isinstance(root, ast.Attribute | ast.Subscript):
            root = root.value
        return isinstance(root, ast.Constant) or (isinstance(root, ast.Name) and root.id in self._errors)


def _of_self(call: ast.Call) -> str:
    function = call.func
    if isinstance(function, ast.Attribute) and ast.unparse(function.value) == "self":
        return function.attr
    return ""


def _is_exception(name: str) -> bool:
    kind = getattr(builtins, name, None)
    return isinstance(kind, type) and issubclass(kind, Exception)


def _check(function: str, bodies: list[list[str]]) -> str:
    lines = "\n".join(f"    {line}" for body in bodies for line in body)
    return f"{_RAISED}\ndef check({function}):\n{lines}\n"
