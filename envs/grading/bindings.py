"""What names in a Python test file stand for: assignments, loops over literals, and parametrized tests."""

from __future__ import annotations

import ast

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

Bindings = dict[str, list[ast.expr]]
"""Name -> the literals that it stands for, somewhere in the file."""


def name_of(function: ast.expr) -> str:
    """The name that is called, without what it is an attribute of."""
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def root_of(node: ast.expr) -> str:
    """The variable that ``x``, ``x[0]`` or ``x.y`` begins with."""
    while isinstance(node, ast.Subscript | ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def picked(operand: ast.expr, value: ast.expr) -> ast.expr:
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


def is_literal(node: ast.expr) -> bool:
    """Whether it is data alone, or data in a call that only wraps it."""
    if isinstance(node, ast.Call):
        return name_of(node.func) in _WRAPPERS and bool(node.args) and all(map(is_literal, node.args))
    if isinstance(node, ast.UnaryOp):
        return not isinstance(node.op, ast.Not) and is_literal(node.operand)
    if isinstance(node, ast.Constant | ast.BinOp | ast.List | ast.Tuple | ast.Set | ast.Dict):
        children = [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr)]
        return all(map(is_literal, children))
    return False


def bindings(tree: ast.AST) -> Bindings:
    """Name -> all that it stands for somewhere in the file, as far as that is written there."""
    found: Bindings = {}
    nodes = list(ast.walk(tree))
    for node in nodes:
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and is_literal(node.value):
            _bind(node.targets[0], node.value, found)
        elif isinstance(node, ast.AnnAssign) and node.value is not None and is_literal(node.value):
            _bind(node.target, node.value, found)
    assigned = {name: list(values) for name, values in found.items()}
    for node in nodes:
        if isinstance(node, ast.For | ast.comprehension):
            for row in _rows(node.iter, assigned):
                _bind(node.target, row, found)
        elif isinstance(node, ast.Call) and name_of(node.func) == "parametrize" and len(node.args) > 1:
            target = _parameters(node.args[0])
            for row in _rows(node.args[1], assigned):
                _bind(target, row, found)
    return found


def _bind(target: ast.expr, value: ast.expr, found: Bindings) -> None:
    if isinstance(target, ast.Name):
        found.setdefault(target.id, []).append(value)
    elif isinstance(target, ast.Tuple | ast.List):
        is_row = isinstance(value, ast.Call) and name_of(value.func) == "param"
        parts = value.args if isinstance(value, ast.Call) and is_row else getattr(value, "elts", [])
        for part_target, part in zip(target.elts, parts, strict=False):
            _bind(part_target, part, found)


def _rows(values: ast.expr, assigned: Bindings) -> list[ast.expr]:
    """What a loop over ``values`` goes through, as far as that is written in the file."""
    if isinstance(values, ast.Name):
        return [row for value in assigned.get(values.id, ()) for row in _rows(value, {})]
    if (
        isinstance(values, ast.Call)
        and name_of(values.func) == "items"
        and isinstance(values.func, ast.Attribute)
    ):
        return _items(values.func.value, assigned)
    return list(values.elts) if isinstance(values, ast.List | ast.Tuple | ast.Set) else []


def _items(mapping: ast.expr, assigned: Bindings) -> list[ast.expr]:
    found = [mapping] if isinstance(mapping, ast.Dict) else assigned.get(root_of(mapping), [])
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
