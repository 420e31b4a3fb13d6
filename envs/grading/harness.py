"""Runs assertions inside a sandbox of their own, where nothing of the agent's has ever been.

This file's text is put into that sandbox and its two functions are called there. A check is Python source that
defines ``check(candidate)``; each ``assert`` in it is recorded and does not end the check when it fails. An
``assert`` inside of a ``try`` counts when it holds and fails as written otherwise, for an ``except`` may be meant
to see it.
"""

from __future__ import annotations

import ast
import builtins
import os
import random
import sys
import types
from collections.abc import Callable
from typing import Any

from hintloop.envs.sandbox.values import decode, encode

MAX_TEXT = 200
MAX_GOT = 40
_NO_VALUE = ("Timeout", "Exited", "Killed", "NotData")
"""Errors that the function did not raise."""


def record(source: str, path: str, function: str) -> dict[str, Any]:
    """Run a check on the function of a file here: what was asserted, and the ``calls`` (argument lists, as text)."""
    real = _load(path, function)
    run = _Run(function)
    calls: dict[str, None] = {}

    def candidate(*arguments: Any) -> Any:
        calls[encode(list(arguments))] = None
        return run.note(real(*arguments))

    return {**run.check(source, candidate), "calls": list(calls)}


def replay(source: str, function: str, answers: dict[str, list[str]]) -> dict[str, Any]:
    """Run a check on answers: what was asserted, and the calls that have no answer, as ``missing``.

    An answer to an argument list (its text) is ``["value", text]`` or ``["error", type and message]``.
    """
    run = _Run(function)
    missing: dict[str, None] = {}

    def candidate(*arguments: Any) -> Any:
        asked = encode(list(arguments))
        if asked not in answers:
            missing[asked] = None
            raise run.give_up("not called: the check's calls follow from each other for too long")
        kind, text = answers[asked]
        if kind == "value":
            return run.note(decode(text))
        raise run.give_up(text) if text.partition(":")[0] in _NO_VALUE else run.note_error(text)

    return {**run.check(source, candidate), "missing": list(missing)}


class _NoAnswer(BaseException):
    """Where there is no answer; no ``except Exception`` of a check takes it for what the function raised."""


class _Run:
    """Counts of one run of a check."""

    def __init__(self, function: str) -> None:
        self.function = function
        self.said = ""
        """What the function gave last."""
        self.raised: BaseException | None = None
        """Its last exception."""
        self.executed = self.held = 0
        self.failed: str | None = None

    def check(self, source: str, candidate: Callable[..., Any]) -> dict[str, Any]:
        tree = ast.fix_missing_locations(_Recording(source).visit(ast.parse(source)))
        module = types.ModuleType("check")
        module.__dict__["_assertion"] = lambda text, guarded: _Assertion(self, text, guarded)
        random.seed(0)
        try:
            exec(compile(tree, "check.py", "exec", dont_inherit=True, optimize=0), module.__dict__)
            module.__dict__["check"](candidate)
        except BaseException as error:  # noqa: BLE001 - whatever it is, it is recorded
            self.fail("check", error)
        return {"executed": self.executed, "held": self.held, "failed": self.failed}

    def note(self, value: Any) -> Any:
        self.said = f"{self.function} gave {_short(value)}"
        return value

    def note_error(self, text: str) -> BaseException:
        self.said, self.raised = f"{self.function} raised {text}", _raised(text)
        return self.raised

    def give_up(self, text: str) -> BaseException:
        self.said, self.raised = f"{self.function} gave no value: {text}", _NoAnswer(text)
        return self.raised

    def fail(self, text: str, error: BaseException) -> None:
        self.executed += 1
        if self.failed is None:
            known = type(error) is AssertionError or error is self.raised
            reason = "" if known else f"{type(error).__name__}: {error}"[:MAX_TEXT]
            self.failed = f"{text} ({'; '.join(filter(None, (self.said, reason))) or 'not so'})"


class _Assertion:
    """Around one ``assert``."""

    def __init__(self, run: _Run, text: str, guarded: bool) -> None:
        self._run, self._text, self._guarded = run, text, guarded

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        if error is None:
            self._run.executed += 1
            self._run.held += 1
            return False
        if not self._guarded:
            self._run.fail(self._text, error)
        return not self._guarded


class _Recording(ast.NodeTransformer):
    """``assert x`` -> ``with _assertion("assert x", guarded): assert x``."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._guarded = False

    def visit_Assert(self, node: ast.Assert) -> ast.With:
        text = " ".join((ast.get_source_segment(self._source, node.test) or "").split())
        told: list[ast.expr] = [ast.Constant(f"assert {text}"[:MAX_TEXT]), ast.Constant(self._guarded)]
        call = ast.Call(ast.Name("_assertion", ast.Load()), told, [])
        return ast.copy_location(ast.With([ast.withitem(call, None)], [node]), node)

    def visit_Try(self, node: ast.Try) -> ast.Try:
        before, self._guarded = self._guarded, self._guarded or bool(node.handlers)
        node.body = [self.visit(statement) for statement in node.body]
        self._guarded = before
        node.handlers = [self.visit(handler) for handler in node.handlers]
        node.orelse = [self.visit(statement) for statement in node.orelse]
        node.finalbody = [self.visit(statement) for statement in node.finalbody]
        return node


def _load(path: str, function: str) -> Callable[..., Any]:
    with open(path, "rb") as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    name = os.path.basename(path)[: -len(".py")]
    module = sys.modules[name] = types.ModuleType(name)
    exec(code, module.__dict__)
    found: Callable[..., Any] = getattr(module, function)
    return found


def _raised(text: str) -> BaseException:
    """The exception of an error's text; one that is not Python's own becomes a plain ``Exception`` of that name.

    So does one that would end a loop of the check: ``all(map(f, ...))`` must not hold because ``f`` stops it.
    """
    name, _, message = text.partition(": ")
    kind = getattr(builtins, name, None)
    if not isinstance(kind, type) or name in ("StopIteration", "StopAsyncIteration"):
        kind = type(name, (Exception,), {})
    if not issubclass(kind, Exception):
        return _NoAnswer(text)
    try:
        error: BaseException = kind(message)
    except TypeError:  # UnicodeDecodeError and its like want more
        error = Exception(text)
    return error


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= MAX_GOT else text[: MAX_GOT - 3] + "..."
