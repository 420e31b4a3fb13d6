"""Expert traces for the warm start: right, human, and with hints.

A trace solves a bugfix task through the real tools (on trusted code, in this process). On the way the expert
makes the tool errors that a young agent makes, and recovers from them. In hinted traces it is warned of one
kind of error at some turns; it does not make that kind then, and every other kind as often as ever. Now and then
a hint belongs to another turn; then the expert acts as if there were none.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hintloop.agent import hints
from hintloop.envs.models import ToolCall, ToolResult
from hintloop.envs.sandbox.base import CallResult, ExecResult, SandboxDead
from hintloop.envs.task import Task
from hintloop.envs.tasksets.bugfix.expert import edit_call, fixes, next_fix
from hintloop.envs.tasksets.bugfix.functions import run
from hintloop.envs.tasksets.bugfix.mutations import mutations, random_spelling, unique_fragment
from hintloop.envs.tasksets.bugfix.taskset import PATH, Bugfix, reference
from hintloop.envs.tools import TOOL_PROMPT, ToolBox

_WRONG_NAMES = {
    "read_file": ("open_file", "cat", "read"),
    "edit_file": ("replace", "edit", "change_file"),
    "run_tests": ("test", "pytest", "run"),
    "submit": ("done", "finish"),
}
_WRONG_PATHS = ("main.py", "src/solution.py", "solution", "app.py")
_OPERATORS = ("+", "-", "*", "%", ">", "<", ">=", "<=", "==", "!=", "+=", "-=", "0", "1", "2", "3")


@dataclass(frozen=True, slots=True)
class Habits:
    """Probabilities, per turn where they apply, of what the expert does besides the right call."""

    wrong_name: float = 0.11
    wrong_path: float = 0.08
    wrong_old: float = 0.05
    wrong_line: float = 0.05
    missing_argument: float = 0.08
    bad_json: float = 0.09
    wrong_fix: float = 0.35
    """Per episode: a plausible but wrong edit first, mended after the tests have shown it."""
    skip_tests: float = 0.3
    give_up: float = 0.35
    """After a failing test: submit all the same."""
    read_again: float = 0.15
    hinted_trace: float = 0.5
    hinted_turn: float = 0.5
    """Per turn of a hinted trace."""
    stray_hint: float = 0.15
    """Per hint: it belongs to another turn."""
    guided: float = 0.5
    """Per file with several bugs: the lines are mended in any order, and hints say which is next."""


@dataclass(frozen=True, slots=True)
class TraceTurn:
    """One assistant turn: the hint before it (if any), what it says, and the tool result after it."""

    text: str
    output: str
    hint: str | None = None


@dataclass(frozen=True, slots=True)
class Trace:
    """A whole conversation; ``messages`` are the first ones (system, user)."""

    messages: tuple[dict[str, str], ...]
    turns: tuple[TraceTurn, ...]


@dataclass
class TrustedWorkspace:
    """Files in memory, and functions called in this process: for code of our own making only."""

    files: dict[str, bytes] = field(default_factory=dict)

    def exec(self, command: str, *, timeout: float, stdin: bytes = b"") -> ExecResult:
        raise SandboxDead("a trusted workspace runs no commands")

    def call_function(
        self, path: str, function: str, calls: Sequence[Sequence[Any]], *, timeout: float
    ) -> list[CallResult]:
        try:
            results = run(self.read(path).decode(), function, tuple(tuple(call) for call in calls))
        except (SyntaxError, NameError, KeyError) as error:
            return [CallResult(error=f"{type(error).__name__}: in file")] * len(calls)
        return [
            CallResult(value=value) if status == "ok" else CallResult(error=f"{value}: in call")
            for status, value in results
        ]

    def read(self, path: str) -> bytes:
        if path not in self.files:
            raise FileNotFoundError(path)
        return self.files[path]

    def write(self, path: str, data: bytes) -> None:
        self.files[path] = data

    def list_files(self) -> list[str]:
        return sorted(self.files)

    @property
    def text(self) -> str:
        """The file under repair."""
        return self.files[PATH].decode()


def call_text(call: ToolCall) -> str:
    """A call as Qwen3 writes it (Hermes JSON)."""
    body = json.dumps({"name": call.name, "arguments": call.arguments})
    return f"<tool_call>\n{body}\n</tool_call>"


def first_messages(task: Task) -> tuple[dict[str, str], ...]:
    """The one-line prompt of the tiny student."""
    system, user = f"Tools: {TOOL_PROMPT}", task.instruction
    return ({"role": "system", "content": system}, {"role": "user", "content": user})


class TraceMaker:
    """Makes traces from training bugs only, from one random generator."""

    def __init__(self, taskset: Bugfix, rng: random.Random, habits: Habits | None = None):
        self._taskset = taskset
        self._rng = rng
        self._habits = habits or Habits()
        self._recent_hints = ["Hint: write one tool call as valid JSON"]
        by_function: dict[str, set[int]] = {}
        for task_id in taskset.splits()["train"]:
            key, number, _ = task_id.removeprefix("bugfix/").split(".")
            by_function.setdefault(key, set()).add(int(number))
        self._bugs = {key: sorted(numbers) for key, numbers in by_function.items()}
        self._singles = [(key, number) for key, numbers in self._bugs.items() for number in numbers]
        self._multiples = [key for key, numbers in self._bugs.items() if len(numbers) >= 3]

    def task(self) -> Task:
        """A file with one bug."""
        key, number = self._rng.choice(self._singles)
        bug = self._taskset.bugs[key][number]
        return self._taskset.make(key, [bug], random_spelling(self._rng), "bugfix/trace")

    def single(self) -> Trace:
        """A human trace on a file with one bug."""
        return _Expert(self, self.task()).play()

    def multiple(self) -> Trace:
        """A faultless trace on a file with two to six bugs: practice in copying and editing."""
        key = self._rng.choice(self._multiples)
        numbers = self._rng.sample(self._bugs[key], min(len(self._bugs[key]), self._rng.randint(2, 6)))
        at = {(bug.line, bug.start): bug for bug in (self._taskset.bugs[key][n] for n in numbers)}
        task = self._taskset.make(key, list(at.values()), random_spelling(self._rng), "bugfix/trace")
        workspace = TrustedWorkspace({PATH: task.files[PATH].encode()})
        tools = ToolBox(task, workspace)
        turns = [_turn(tools, ToolCall(name="read_file", arguments={"path": PATH}))]
        guided = self._rng.random() < self._habits.guided
        while left := fixes(workspace.text, reference(task)):
            fix = self._rng.choice(left) if guided else left[0]
            lines = workspace.text.count("\n") + 1
            hint = _where_hint(ToolBox(task, workspace), fix, lines) if guided else None
            turns.append(_turn(tools, fix, hint))
        turns.append(_turn(tools, ToolCall(name="submit")))
        system, user = first_messages(task)
        return Trace((system, {**user, "content": f"{user['content']} (all bugs)"}), tuple(turns))

    @property
    def rng(self) -> random.Random:
        """The one source of randomness."""
        return self._rng

    @property
    def habits(self) -> Habits:
        """How the expert errs."""
        return self._habits

    def hint_for(self, result: ToolResult) -> tuple[str | None, bool]:
        """The hint of a failed call, and whether it matches; now and then it belongs to another error."""
        hint = hints.dispatch(result.error) if result.error else None
        if hint is None:
            return None, False
        self._recent_hints = [*self._recent_hints[-49:], hint]
        if self._rng.random() >= self._habits.stray_hint:
            return hint, True
        others = [other for other in self._recent_hints if other != hint]
        return (self._rng.choice(others), False) if others else (hint, True)


def _turn(tools: ToolBox, call: ToolCall, hint: str | None = None) -> TraceTurn:
    return TraceTurn(call_text(call), tools.call(call).output, hint)


def _where_hint(tools: ToolBox, fix: ToolCall, num_lines: int) -> str | None:
    """What the agent would be told after the edit ``fix`` of a line that does not have its old text."""
    for line in range(1, num_lines + 1):
        error = tools.call(_changed(fix, line=line, new=fix.arguments["old"])).error
        if error:
            return hints.dispatch(error)
    return None


_Way = Callable[[ToolCall], ToolCall | tuple[str, ToolCall] | None]


class _Expert:
    """One human trace: read, (wrong fix), fix, test, submit, with tool errors or hints on the way."""

    def __init__(self, maker: TraceMaker, task: Task):
        self._maker, self._rng, self._habits = maker, maker.rng, maker.habits
        self._task = task
        self._workspace = TrustedWorkspace({PATH: task.files[PATH].encode()})
        self._tools = ToolBox(task, self._workspace)
        self._hinted = self._rng.random() < self._habits.hinted_trace
        self._wrong_fix = self._rng.random() < self._habits.wrong_fix
        self._turns: list[TraceTurn] = []

    def play(self) -> Trace:
        """The trace, at most ``task.max_turns`` turns."""
        phase = "read"
        while phase != "end" and len(self._turns) < self._task.max_turns:
            call = self._right_call(phase)
            if call is None:
                phase = "test"
                continue
            result = self._act(call)
            phase = phase if result is None else self._next_phase(phase, result)
        return Trace(first_messages(self._task), tuple(self._turns))

    def _right_call(self, phase: str) -> ToolCall | None:
        if phase == "read":
            return ToolCall(name="read_file", arguments={"path": PATH})
        if phase == "test":
            return ToolCall(name="run_tests")
        if phase == "submit":
            return ToolCall(name="submit")
        return self._plausible_wrong_fix() or next_fix(self._workspace.text, reference(self._task))

    def _plausible_wrong_fix(self) -> ToolCall | None:
        if not self._wrong_fix:
            return None
        lines = self._workspace.text.split("\n")
        wanted = reference(self._task).split("\n")
        choices = [m for m in mutations(lines) if m.apply(lines) != wanted]
        if not choices:
            return None
        chosen = self._rng.choice(choices)
        return edit_call(chosen.line + 1, *unique_fragment(lines[chosen.line], chosen))

    def _act(self, call: ToolCall) -> ToolResult | None:
        """Take one turn: the right call or a failing one, perhaps after a hint. None when the call failed."""
        hint, warned = self._hint(call)
        ways = {way: chance for way, chance in self._ways(call).items() if way not in warned}
        failing = self._failing(call, ways) if self._rng.random() < sum(ways.values()) else None
        text, tried = failing or (call_text(call), call)
        result = self._tools.call(tried)
        self._turns.append(TraceTurn(text, result.output, hint))
        return None if failing else result

    def _hint(self, call: ToolCall) -> tuple[str | None, tuple[_Way, ...]]:
        """A hint for this turn, if any, and the ways to err that it keeps the expert from: none, if it is stray."""
        if not self._hinted or self._rng.random() >= self._habits.hinted_turn:
            return None, ()
        edits: tuple[_Way, ...] = (self._with_wrong_old, self._with_wrong_line)
        ways = self._ways(call)
        ways |= {
            way: 6 * ways[way] for way in edits if way in ways
        }  # what live agents get wrong most, by far
        way = self._draw(ways)
        failing = _with_text(way(call))
        if failing is None:
            return None, ()
        dry_run = ToolBox(self._task, self._workspace).call(failing[1])  # such a call changes nothing
        hint, matches = self._maker.hint_for(dry_run)
        if not matches:
            return hint, ()
        return hint, edits if way in edits else (way,)

    def _ways(self, call: ToolCall) -> dict[_Way, float]:
        """How the expert may get ``call`` wrong, each with its probability."""
        habits, arguments = self._habits, call.arguments
        ways: dict[_Way, float] = {
            self._with_wrong_name: habits.wrong_name,
            self._as_bad_json: habits.bad_json,
        }
        if "path" in arguments:
            ways |= {self._with_wrong_path: habits.wrong_path, self._without_one: habits.missing_argument}
        if "old" in arguments:
            ways |= {self._with_wrong_old: habits.wrong_old, self._with_wrong_line: habits.wrong_line}
        return ways

    def _failing(self, call: ToolCall, ways: dict[_Way, float]) -> tuple[str, ToolCall] | None:
        """``call`` gone wrong in one of some ways, as text and call; None when that way does not exist here."""
        return _with_text(self._draw(ways)(call))

    def _draw(self, ways: dict[_Way, float]) -> _Way:
        return self._rng.choices(list(ways), list(ways.values()))[0]

    def _with_wrong_name(self, call: ToolCall) -> ToolCall:
        return call.model_copy(update={"name": self._rng.choice(_WRONG_NAMES[call.name])})

    def _with_wrong_path(self, call: ToolCall) -> ToolCall:
        return _changed(call, path=self._rng.choice(_WRONG_PATHS))

    def _without_one(self, call: ToolCall) -> ToolCall:
        gone = self._rng.choice([name for name in call.arguments if name != "line"])
        return call.model_copy(update={"arguments": {k: v for k, v in call.arguments.items() if k != gone}})

    def _with_wrong_old(self, call: ToolCall) -> ToolCall | None:
        line = self._workspace.text.split("\n")[call.arguments["line"] - 1]
        choices = [o for o in _OPERATORS if o not in line and o != call.arguments["new"]]
        return _changed(call, old=self._rng.choice(choices)) if choices else None

    def _with_wrong_line(self, call: ToolCall) -> ToolCall | None:
        lines = self._workspace.text.split("\n")
        choices = [
            n for n in range(1, len(lines) + 2) if n > len(lines) or call.arguments["old"] not in lines[n - 1]
        ]
        return _changed(call, line=self._rng.choice(choices)) if choices else None

    def _as_bad_json(self, call: ToolCall) -> tuple[str, ToolCall]:
        text = call_text(call)
        old, new = ("}}", "}") if self._rng.random() < 0.5 else ('"name": "', '"name": ')
        text = text.replace(old, new, 1)
        return text, ToolCall(malformed=text)

    def _next_phase(self, phase: str, result: ToolResult) -> str:
        if phase == "read":
            return "edit"
        if phase == "edit":
            self._wrong_fix, was_wrong = False, self._wrong_fix
            return "submit" if not was_wrong and self._rng.random() < self._habits.skip_tests else "test"
        if phase == "test" and result.exit_code != 0:
            if self._rng.random() < self._habits.give_up:
                return "submit"
            return "read" if self._rng.random() < self._habits.read_again else "edit"
        return "submit" if phase == "test" else "end"


def _with_text(made: ToolCall | tuple[str, ToolCall] | None) -> tuple[str, ToolCall] | None:
    """What is said, and the call that comes of it; a call that is no text of its own is said as it is."""
    return (call_text(made), made) if isinstance(made, ToolCall) else made


def _changed(call: ToolCall, **arguments: Any) -> ToolCall:
    return call.model_copy(update={"arguments": {**call.arguments, **arguments}})
