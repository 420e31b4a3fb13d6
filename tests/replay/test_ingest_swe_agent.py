"""SWE-agent files: each known quirk, and that every record is accounted for."""

from __future__ import annotations

from typing import Any

import pytest

from hintloop.replay.ingest.classify import classify
from hintloop.replay.ingest.terminal import went_wrong, without_prompt

from .recordings import Record, balanced, read
from .samples import FAILED, document, swe_document, swe_history, swe_prompt, swe_step


def all_of(value: Record) -> Any:
    traces, report = read(document(value), "swe_agent")
    assert balanced(report)
    return traces, report


def one(value: Record) -> Any:
    (trace,), report = all_of(value)
    return trace, report


def test_the_history_is_the_conversation_and_the_steps_give_times() -> None:
    trace, report = one(swe_document())
    assert [(m.role, m.text, len(m.calls)) for m in trace.messages] == [
        ("system", "SETTING", 0),
        ("user", "list the files", 0),
        ("assistant", "I look.", 1),
        ("assistant", "Again.", 1),
    ]
    first, second = (m.calls[0] for m in trace.messages[2:])
    assert (first.name, first.arguments, first.result.seconds) == ("bash", '{"command":"lss"}', 0.5)
    assert (second.call_id, second.result.text) == ("c2", swe_prompt("a.py\r\nb.py"))
    failure = classify(first)
    assert failure is not None
    assert (failure.kind, failure.cause, failure.message) == ("command_not_found", "model", FAILED)
    assert classify(second) is None
    assert report.ignored["step"] == 2
    assert report.notes["exit:submitted"] == 1
    assert trace.versions == ("1.1.0",)


def test_a_demonstration_may_hold_only_the_history_and_another_file_only_steps() -> None:
    trace, report = one({"history": swe_history()})
    assert (len(trace.messages), report.used) == (4, 7)
    steps = [swe_step("lss", FAILED, query=swe_history()[:2]), swe_step("ls", "a.py")]
    trace, report = one({"trajectory": steps})
    assert [(m.role, len(m.calls)) for m in trace.messages] == [
        ("system", 0),
        ("user", 0),
        ("assistant", 1),
        ("assistant", 1),
    ]
    assert report.used == 3


def test_the_state_may_be_a_string_and_messages_stand_where_the_query_is_now() -> None:
    value = swe_document()
    for step in value["trajectory"]:
        step.update(state='{"open_file": "n/a"}', messages=swe_history())
    assert len(one(value)[0].messages) == 4


def test_the_last_result_is_in_the_steps_of_older_files() -> None:
    value = {**swe_document(), "history": swe_history()[:3], "trajectory": [swe_step("lss\n", FAILED)]}
    trace, _ = one(value)
    assert trace.messages[-1].calls[0].result.text == FAILED
    value["trajectory"] = [swe_step("other", FAILED)]
    trace, report = one(value)
    assert trace.messages[-1].calls[0].result is None
    assert report.notes["call_without_result"] == 1


def test_demonstrations_are_context_only() -> None:
    demo = [{**item, "is_demo": True} for item in swe_history()[2:]]
    trace, report = one({"history": [*swe_history()[:1], *demo, *swe_history()[1:]]})
    assert [m.copied for m in trace.messages if m.role == "assistant"] == [True, True, False, False]
    assert report.notes["demonstration"] == 4


def retried(complaint: str) -> Record:
    """A step whose first answer was taken back."""
    wrong = [
        {"role": "assistant", "content": "no block", "agent": "main", "message_type": "assistant"},
        {"role": "user", "content": complaint, "agent": "main", "message_type": "user"},
    ]
    value = swe_document()
    before = swe_history()[:2]
    value["trajectory"] = [
        swe_step("", "", query=before),
        swe_step("lss\n", FAILED, query=[*before, *wrong]),
        swe_step("ls", "a.py\r\nb.py", query=swe_history()[:4]),
    ]
    return value


@pytest.mark.parametrize(
    ("complaint", "expected"),
    [
        ("Your output was not formatted correctly.", ("json_decode", "model")),
        ("Your bash command contained syntax errors and was NOT executed.", ("syntax_error", "model")),
        ("Operation 'vim' is not supported by this environment.", ("permission_denied", "user")),
        ("unknown tool foo", ("tool_not_found", "model")),
    ],
)
def test_an_answer_that_was_taken_back_is_a_conversation_of_its_own(complaint: str, expected: Any) -> None:
    (side, main), report = all_of(retried(complaint))
    assert (side.branch, main.branch) == ("taken_back1", "main")
    assert [(m.text, m.copied) for m in side.messages] == [
        ("SETTING", True),
        ("list the files", True),
        ("no block", False),
        (complaint, True),
    ]
    failure = side.messages[2].failure
    assert (failure.kind, failure.cause, failure.message) == (*expected, complaint)
    assert len(main.messages) == 4
    assert report.notes["taken_back"] == 1


@pytest.mark.parametrize("status", ["submitted (exit_context)", "exit_cost"])
def test_what_the_tool_says_in_the_models_place_is_no_message(status: str) -> None:
    value = swe_document()
    said = {
        "role": "assistant",
        "content": "Exit due to context window",
        "action": "",
        "thought": "Exit due to ...",
    }
    ended = {"role": "user", "content": "Exited (autosubmitted)", "message_type": "observation"}
    value["history"] += [{**said, "agent": "main"}, {**ended, "agent": "main"}]
    value["info"]["exit_status"] = status
    trace, report = one(value)
    assert "Exit due" not in str(trace)
    assert (report.ignored["giving_up"], report.notes[f"exit:{status}"]) == (1, 1)


def test_a_dead_environment_is_nobodys_doing() -> None:
    failure = went_wrong("Environment died unexpectedly. Exited (autosubmitted)")
    assert failure is not None
    assert (failure.kind, failure.cause) == ("runtime_error", "infra")


def test_other_agents_in_a_file_are_left_out() -> None:
    value = swe_document()
    value["history"].insert(
        2, {"role": "assistant", "content": "short", "agent": "summarizer", "message_type": "action"}
    )
    trace, report = one(value)
    assert (len(trace.messages), report.ignored["other_agent"]) == (4, 1)


TRACEBACK = 'Traceback (most recent call last):\n  File "a.py", line 1, in <module>\n    x\n'


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("bash: foo: command not found", "command_not_found"),
        ("/bin/bash: line 1: foo: command not found", "command_not_found"),
        ("sh: 1: foo: not found", "command_not_found"),
        ("cat: a.py: No such file or directory", "file_not_found"),
        ("python: can't open file '/w/a.py': [Errno 2] No such file or directory", "file_not_found"),
        ("File a.py not found", "file_not_found"),
        ("ls: cannot open directory '/root': Permission denied", "permission_denied"),
        ("usage: foo [-h] name\nfoo: error: the following arguments are required: name", "type_error"),
        ("Your proposed edit has introduced new syntax error(s).\nERRORS:\n- E999", "syntax_error"),
        ("No replacement was performed, old_str did not appear", "edit_no_match"),
        ("started\nEXECUTION TIMED OUT", "timeout"),
        (f"{TRACEBACK}NameError: name 'x' is not defined", "runtime_error"),
        (f"{TRACEBACK}pkg.errors.OddError: no", "runtime_error"),
        (f"{TRACEBACK}FileNotFoundError: a", "file_not_found"),
        (f"{TRACEBACK}AssertionError", "test_failure"),
        ("  File \"a.py\", line 4\n    def f(\nSyntaxError: '(' was never closed", "syntax_error"),
        ("", None),
        ("a.py\nb.py", None),
        (f"{TRACEBACK}NameError: x\nand it went on", None),
        ("ValueError: raised in the docs", None),
        ("1: x\n2: bash: foo: command not found\n3: y", None),
        ("In the log:\nbash: foo: command not found\nthe end", None),
    ],
)
def test_the_text_of_a_terminal_tells_of_failures(text: str, kind: str | None) -> None:
    failure = went_wrong(without_prompt(swe_prompt(text.replace("\n", "\r\n"))))
    assert (failure and failure.kind) == kind
