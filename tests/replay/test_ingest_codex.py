"""Codex files: each known quirk, and that every record is accounted for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hintloop.replay.ingest.report import Refused

from .recordings import balanced, codex, codex_meta, item, lines, read, said, small_codex


def one(records: list[Any]) -> Any:
    traces, report = read(lines(records), "codex")
    assert balanced(report)
    (trace,) = traces
    return trace, report


def results(trace: Any) -> list[Any]:
    return [call.result for message in trace.messages for call in message.calls]


def test_reads_a_plain_conversation_without_mirrors_and_injected_text() -> None:
    trace, report = one(small_codex())
    assert [(m.role, m.text, len(m.calls)) for m in trace.messages] == [
        ("user", "patch it", 0),
        ("assistant", "", 1),
        ("assistant", "", 1),
        ("assistant", "done", 0),
    ]
    assert trace.messages[1].thinking == "hm"
    assert trace.messages[1].calls[0].arguments == '{"input":"*** Begin Patch"}'
    assert (results(trace)[1].exit_code, results(trace)[1].seconds) == (0, 1.5)
    assert (trace.session, trace.model, trace.versions) == ("s1", "gpt-5-codex", ("0.47.0",))
    assert report.ignored == {"event_msg:agent_message": 1}
    assert report.notes == {"injected_text": 1, "thinking": 1}


@pytest.mark.parametrize(
    ("output", "text", "code", "flag"),
    [
        ("plain", "plain", None, None),
        ('{"output":"x","metadata":{"exit_code":2}}', "x", 2, None),
        ('{"output":"x","metadata":{"exit_code":"2"}}', "x", None, None),
        ('{"metadata": broken', '{"metadata": broken', None, None),
        ("Exit code: 1\nWall time: 0.5 seconds\nOutput:\nno", None, 1, None),
        ("Chunk ID: a\nWall time: 1 seconds\nProcess exited with code 127\nOutput:\nno", None, 127, None),
        ("Chunk ID: a\nOutput:\nExit code: 9", None, None, None),
        ({"content": "no", "success": False}, "no", None, True),
        ([{"type": "input_text", "text": "a"}, {"type": "input_image"}], "a\n[image]", None, None),
        (None, "", None, None),
    ],
)
def test_an_output_has_many_forms(output: Any, text: str | None, code: int | None, flag: bool | None) -> None:
    call = item("function_call", name="shell", arguments="{}", call_id="c")
    trace, _ = one([codex_meta(), call, item("function_call_output", call_id="c", output=output)])
    (result,) = results(trace)
    assert result.text == (output if text is None else text)
    assert (result.exit_code, result.is_error) == (code, flag)


def test_parallel_calls_are_one_turn() -> None:
    records = [codex_meta(), said("user", "go")]
    records += [item("function_call", name="shell", arguments="{}", call_id=c) for c in "ab"]
    records += [item("function_call_output", call_id=c, output=c.upper()) for c in "ba"]
    trace, _ = one(records)
    assert [len(message.calls) for message in trace.messages] == [0, 2]
    assert [result.text for result in results(trace)] == ["A", "B"]


def test_orphans_and_repeated_ids_are_counted_and_paired_by_order() -> None:
    call = item("function_call", name="shell", arguments="not json", call_id="c")
    records = [
        codex_meta(),
        item("function_call_output", call_id="x", output="orphan"),
        call,
        item("function_call_output", call_id="c", output="1"),
        item("function_call_output", call_id="c", output="again"),
        call,
        item("function_call_output", call_id="c", output="2"),
        item("function_call", name="shell", arguments="{}", call_id="d"),
        item("web_search_call", status="completed"),
    ]
    trace, report = one(records)
    assert [result and result.text for result in results(trace)] == ["1", "2", None]
    assert trace.messages[0].calls[0].arguments == '"not json"'
    assert report.notes == {
        "result_without_call": 1,
        "repeated_result": 1,
        "repeated_call_id": 1,
        "call_without_result": 1,
        "web_search_call": 1,
    }


def test_a_compaction_starts_a_conversation_with_what_replaced_the_old_one() -> None:
    history = [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "short"}]}]
    records = [*small_codex(), codex("compacted", {"message": "m", "replacement_history": history})]
    records += [said("assistant", "on"), codex("compacted", {"message": "summary"}), said("assistant", "off")]
    traces, report = read(lines(records), "codex")
    assert [trace.branch for trace in traces] == ["main", "part1", "part2"]
    assert [trace.messages[0].text for trace in traces] == ["patch it", "short", "summary"]
    assert balanced(report)


def test_instructions_are_the_system_message_and_a_second_session_is_a_copy() -> None:
    records = [codex_meta(instructions="be brief"), codex_meta("parent"), said("assistant", "ok")]
    trace, report = one(records)
    assert [(m.role, m.text) for m in trace.messages] == [("system", "be brief"), ("assistant", "ok")]
    assert (trace.session, report.notes) == ("s1", {"copied_from_another_session": 1})


def test_the_bare_lines_of_older_versions_are_read() -> None:
    records = [
        {"id": "old", "timestamp": "2025-08-01T00:00:00Z", "instructions": None, "git": {}},
        {"record_type": "state"},
        *[each["payload"] for each in small_codex() if each["type"] == "response_item"],
    ]
    trace, report = one(records)
    assert (trace.session, len(trace.messages)) == ("old", 4)
    assert report.ignored == {"world_state": 1}


def test_unknown_items_are_ignored_by_name_and_unknown_records_skipped() -> None:
    records = [*small_codex(), item("hologram"), codex("event_msg", {"type": "turn_aborted"}), {"type": "x"}]
    _, report = one(records)
    assert report.ignored["response_item:hologram"] == report.ignored["event_msg:turn_aborted"] == 1
    assert report.skipped == {"unknown_type": 1}


def test_a_file_with_many_bad_records_is_refused() -> None:
    with pytest.raises(Refused, match="4 of 15 records"):
        read(lines(small_codex()) + b'{"cut\n' * 4, "codex")


def test_the_shared_file_is_read_as_documented(shared_data: Path) -> None:
    path = shared_data / "traces" / "codex_pomodoro_timer.jsonl"
    traces, report = read(path.read_bytes(), "codex")
    (trace,) = traces
    found = results(trace)
    assert len(found) == 18
    assert [result.exit_code for result in found].count(0) == 13
    assert [result.text for result in found].count("Plan updated") == 4
    assert (report.read, report.used, report.skipped) == (153, 85, {})
    assert balanced(report)
