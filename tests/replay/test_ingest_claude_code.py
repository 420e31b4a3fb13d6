"""Claude Code files: each known quirk, and that every record is accounted for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hintloop.replay.ingest import claude_code as module
from hintloop.replay.ingest import claude_tree
from hintloop.replay.ingest.report import Refused

from .recordings import Claude, balanced, lines, read, small_claude


def one(made: Claude) -> Any:
    """The only conversation of a file whose records are all accounted for."""
    traces, report = read(made.data())
    assert balanced(report)
    (trace,) = traces
    return trace, report


def roles(trace: Any) -> list[str]:
    return [f"{message.role}{len(message.calls) or ''}" for message in trace.messages]


def test_reads_a_plain_conversation() -> None:
    trace, report = one(small_claude())
    assert roles(trace) == ["user", "assistant1", "assistant1", "assistant"]
    failed = trace.messages[1].calls[0]
    assert (failed.name, failed.arguments) == ("Bash", '{"command":"lss"}')
    assert (failed.result.is_error, failed.result.exit_code) == (True, 127)
    assert (trace.model, trace.versions, trace.source) == ("claude-x", ("2.1.206",), "claude_code")
    assert trace.ended_at == pytest.approx(1757238725.5)
    assert (report.used, report.ignored, report.skipped) == (6, {}, {})


def test_records_with_one_message_id_are_one_message_and_the_last_usage_counts() -> None:
    made = Claude()
    made.user("go")
    made.answer([{"type": "thinking", "thinking": "hm", "signature": "x"}], "m1", usage={"output_tokens": 1})
    made.says("I look", "m1", usage={"output_tokens": 5})
    made.calls("c1", "m1", usage={"input_tokens": 2, "cache_read_input_tokens": 3, "output_tokens": 9})
    made.gets("c1")
    trace, _ = one(made)
    (_, message) = trace.messages
    assert (message.text, message.thinking, len(message.calls)) == ("I look", "hm", 1)
    assert (message.usage.input_tokens, message.usage.output_tokens) == (5, 9)


@pytest.mark.parametrize("order", [("c1", "c2"), ("c2", "c1")])
def test_parallel_calls_are_one_turn_whatever_the_order_of_results(order: tuple[str, str]) -> None:
    made = Claude()
    made.user("go")
    first = made.calls("c1", "m1")
    second = made.calls("c2", "m1", parent=first)
    for call in order:
        made.gets(call, f"of {call}", parent=first if call == "c1" else second)
    made.says("done", "m2")
    trace, report = one(made)
    assert roles(trace) == ["user", "assistant2", "assistant"]
    assert [call.result.text for call in trace.messages[1].calls] == ["of c1", "of c2"]
    assert report.notes == {}


def test_several_results_in_one_record_go_to_their_calls_and_its_text_is_a_prompt() -> None:
    made = Claude()
    made.user("go")
    made.calls("c1", "m1")
    made.calls("c2", "m1")
    results = [{"type": "tool_result", "tool_use_id": c, "content": c.upper()} for c in ("c2", "c1")]
    made.user([*results, {"type": "text", "text": "and hurry"}])
    made.says("yes", "m2")
    trace, _ = one(made)
    assert roles(trace) == ["user", "assistant2", "user", "assistant"]
    assert [call.result.text for call in trace.messages[1].calls] == ["C1", "C2"]
    assert trace.messages[2].text == "and hurry"


def test_results_of_several_messages_in_one_record_are_shared_out() -> None:
    made = Claude()
    made.user("go")
    made.calls("c1", "m1")
    made.calls("c2", "m2")
    made.user([{"type": "tool_result", "tool_use_id": c, "content": c} for c in ("c2", "c1")])
    trace, report = one(made)
    assert [call.result.text for m in trace.messages for call in m.calls] == ["c1", "c2"]
    assert report.notes == {}


def test_a_content_may_be_a_string_a_list_or_hold_images() -> None:
    made = Claude()
    made.user([{"type": "text", "text": "look"}, {"type": "image", "source": {"data": "AAAA"}}])
    made.calls("c1", "m1", name="Read")
    made.gets("c1", [{"type": "text", "text": "page"}, {"type": "image", "source": {}}])
    made.add("assistant", {"id": "m2", "role": "assistant", "content": "plain"})
    trace, report = one(made)
    assert trace.messages[0].text == "look\n[image]"
    assert trace.messages[1].calls[0].result.text == "page\n[image]"
    assert trace.messages[2].text == "plain"
    assert report.notes == {"image": 2}


@pytest.mark.parametrize("said", ["Error: it broke", {"stdout": ""}, [1, 2], None, 5])
def test_tool_use_result_may_be_anything(said: Any) -> None:
    made = Claude()
    made.user("go")
    made.calls("c1", "m1")
    made.gets("c1", "it broke", toolUseResult=said)
    trace, _ = one(made)
    assert trace.messages[1].calls[0].result.is_error is (True if isinstance(said, str) else None)


def test_a_duplicate_uuid_counts_once() -> None:
    made = small_claude()
    made.records.insert(3, dict(made.records[2], message={"role": "user", "content": "other"}))
    trace, report = one(made)
    assert roles(trace) == ["user", "assistant1", "assistant1", "assistant"]
    assert report.ignored == {"duplicate_uuid": 1}


def test_history_copied_with_new_uuids_into_another_session_is_read_once() -> None:
    made = small_claude()
    copies = [
        dict(r, uuid="copy-" + r["uuid"], parentUuid=r["parentUuid"] and "copy-" + r["parentUuid"])
        for r in made.records
    ]
    made.records += copies
    made.session, made.last = "another", copies[-1]["uuid"]
    made.user("go on")
    made.says("yes", "m9")
    trace, report = one(made)
    assert [m.text for m in trace.messages if m.text] == ["list the files", "There is a.py", "go on", "yes"]
    assert trace.session == "another"
    assert report.notes["repeated_result"] == 2
    assert report.ignored == {"prompt_without_answer": 1}


def test_a_sidechain_is_a_conversation_of_its_own() -> None:
    made = Claude()
    made.user("go")
    call = made.calls("c1", "m1", name="Task")
    made.user("you are a sub-agent", isSidechain=True, parent=call)
    made.calls("c2", "m2", isSidechain=True)
    made.gets("c2", "Exit code 1\nboom", True, isSidechain=True)
    made.says("done", "m3", isSidechain=True)
    made.gets("c1", "done", parent=call)
    made.says("thanks", "m4")
    traces, report = read(made.data())
    assert sorted(map(roles, traces)) == [["user", "assistant1", "assistant"]] * 2
    assert sorted(trace.branch.startswith("side-") for trace in traces) == [False, True]
    assert balanced(report)


def test_two_agents_with_one_session_are_told_apart() -> None:
    made = Claude()
    for agent in ("a", "b"):
        made.last = None
        made.user(f"agent {agent}", isSidechain=True, agentId=agent)
        made.says("done", "m1", isSidechain=True, agentId=agent)
    traces, _ = read(made.data())
    assert sorted(trace.messages[0].text for trace in traces) == ["agent a", "agent b"]


def test_after_a_compaction_the_summary_is_the_beginning() -> None:
    made = small_claude()
    last = made.last
    made.add("system", subtype="compact_boundary", parent=None, logicalParentUuid=last, compactMetadata={})
    made.user("summary: there is a.py", isCompactSummary=True, isVisibleInTranscriptOnly=True)
    made.says("I go on", "m9")
    traces, report = read(made.data())
    assert [trace.messages[0].text for trace in traces] == ["list the files", "summary: there is a.py"]
    assert report.ignored == {"system:compact_boundary": 1}
    assert balanced(report)


def test_messages_that_a_compaction_kept_stand_behind_its_summary() -> None:
    made = Claude()
    made.user("old")
    made.says("old answer", "m0")
    head = made.user("kept")
    tail = made.says("kept answer", "m1")
    summary = "summary-uuid"
    kept = {"headUuid": head, "anchorUuid": summary, "tailUuid": tail}
    made.add("system", subtype="compact_boundary", parent=None, compactMetadata={"preservedSegment": kept})
    made.user("the summary", isCompactSummary=True, uuid=summary)
    made.user("new", parent=tail)
    made.says("new answer", "m2")
    traces, report = read(made.data())
    texts = [[message.text for message in trace.messages] for trace in traces]
    assert ["the summary", "kept", "kept answer", "new", "new answer"] in texts
    assert balanced(report)


def test_a_prompt_that_was_taken_back_leaves_a_branch_whose_beginning_is_copied() -> None:
    made = Claude()
    made.user("go")
    fork = made.says("which?", "m1")
    made.user("this", parent=fork)
    made.says("this it is", "m2")
    made.user("that", parent=fork)
    made.says("that it is", "m3")
    made.says("and more", "m4")
    traces, report = read(made.data())
    assert [[m.text for m in t.messages][2:] for t in traces] == [
        ["that", "that it is", "and more"],
        ["this", "this it is"],
    ]
    assert [[m.copied for m in t.messages] for t in traces] == [[False] * 5, [True, True, False, False]]
    assert len({trace.branch for trace in traces}) == 2
    assert balanced(report)


def test_a_prompt_without_an_answer_is_counted() -> None:
    made = small_claude()
    made.user("[Request interrupted by user]")
    made.user("never mind")
    trace, report = one(made)
    assert len(trace.messages) == 4
    assert report.ignored == {"prompt_without_answer": 2}


def test_an_interrupted_call_stays_without_result() -> None:
    made = Claude()
    made.user("go")
    made.calls("c1", "m1")
    made.user([{"type": "text", "text": "[Request interrupted by user for tool use]"}])
    made.says("sorry", "m2")
    trace, report = one(made)
    assert trace.messages[1].calls[0].result is None
    assert report.notes == {"call_without_result": 1, "interrupted": 1}


def test_a_refused_call_is_marked() -> None:
    made = Claude()
    made.user("go")
    made.calls("c1", "m1")
    made.gets("c1", "no", True, toolDenialKind="user")
    made.calls("c2", "m2")
    made.gets("c2", "stopped", True, toolUseResult={"interrupted": True})
    trace, _ = one(made)
    assert [call.result.refused for m in trace.messages for call in m.calls] == [True, True]


def test_what_never_reached_the_model_only_links() -> None:
    made = Claude()
    made.user("go")
    made.says("API Error", "m1", isApiErrorMessage=True, model="<synthetic>")
    made.says("No response requested.", "m2", model="<synthetic>")
    made.user("caveat", isVisibleInTranscriptOnly=True)
    made.add("system", subtype="api_error")
    made.add("progress")
    made.add("attachment", attachment={"type": "file"})
    made.says("here I am", "m3")
    made.records.append({"type": "file-history-snapshot", "messageId": made.last, "snapshot": {}})
    made.records.append({"type": "summary", "summary": "x", "leafUuid": made.last})
    trace, report = one(made)
    assert [message.text for message in trace.messages] == ["go", "here I am"]
    assert report.ignored == {
        "api_error": 1,
        "synthetic_message": 1,
        "shown_only": 1,
        "system:api_error": 1,
        "progress": 1,
        "attachment:file": 1,
        "file-history-snapshot": 1,
        "summary": 1,
    }


def test_a_prompt_that_was_queued_is_read() -> None:
    made = Claude()
    made.user("go")
    made.calls("c1", "m1")
    made.gets("c1")
    made.add("attachment", attachment={"type": "queued_command", "prompt": "and tests"})
    made.says("yes", "m2")
    trace, _ = one(made)
    assert [message.text for message in trace.messages] == ["go", "", "and tests", "yes"]


@pytest.mark.parametrize(
    "record",
    [
        {"type": "hologram", "uuid": "x"},
        {"type": ["user"], "uuid": "x"},
        {"0": "a", "1": "b"},
        {"type": "user", "message": "a string", "uuid": "x"},
        {"type": "assistant", "message": {"content": None}, "uuid": "x"},
    ],
)
def test_a_record_of_no_known_kind_is_skipped(record: dict[str, Any]) -> None:
    made = small_claude()
    made.records.append(record)
    trace, report = one(made)
    assert len(trace.messages) == 4
    assert sum(report.skipped.values()) == 1


def test_odd_blocks_and_inputs_are_counted_and_kept_as_text() -> None:
    made = Claude()
    made.user([{"type": "hologram"}, 5, "bare", {"type": "text", "text": 7}])
    made.answer([{"type": "redacted_thinking", "data": "x"}, {"type": ["x"]}, None], "m1")
    made.calls("c1", "m1", given="ls -la")
    made.calls("c2", "m1", given=[1])
    trace, report = one(made)
    assert [call.arguments for call in trace.messages[1].calls] == ['"ls -la"', "[1]"]
    assert trace.messages[0].text == "bare"
    assert report.notes == {"unknown_block": 4, "thinking": 1, "call_without_result": 2}


def test_broken_and_circular_parents_end_a_conversation_but_lose_nothing() -> None:
    made = Claude()
    made.user("lost", parent="nowhere")
    made.says("a", "m1")
    made.user("b", uuid="round", parent="end")
    made.says("c", "m2", uuid="end")
    made.user("self", uuid="self", parent="self")
    made.says("d", "m3")
    traces, report = read(made.data())
    assert sorted(trace.messages[-1].text for trace in traces) == ["a", "c", "d"]
    assert report.notes["parent_missing"] == 1
    assert balanced(report)


def test_a_result_without_call_is_counted() -> None:
    made = small_claude()
    made.gets("nobody")
    made.says("hm", "m9")
    trace, report = one(made)
    assert trace.messages[-1].text == "hm"
    assert report.ignored == {"result_without_call": 1}


def test_records_without_uuid_are_read() -> None:
    made = Claude()
    made.user("go")
    made.says("yes", "m1")
    del made.records[-1]["uuid"]
    trace, _ = one(made)
    assert roles(trace) == ["user", "assistant"]


def test_mixed_versions_are_listed() -> None:
    made = small_claude()
    made.records[-1]["version"] = "2.1.207"
    trace, _ = one(made)
    assert trace.versions == ("2.1.206", "2.1.207")


def test_a_file_with_many_bad_records_is_refused_in_one_line() -> None:
    data = small_claude().data() + b'{"cut\n' * 3
    with pytest.raises(Refused, match="3 of 9 records cannot be used: 3 cut_record"):
        read(data)


def test_too_long_a_conversation_is_cut_and_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_TRACE_BYTES", 1200)
    traces, report = read(small_claude().data())
    assert [roles(trace) for trace in traces] == [["user", "assistant1"]]
    assert report.notes["messages_beyond_limit"] == 2


def test_branches_cannot_make_a_file_be_read_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claude_tree, "_BUDGET_FLOOR", 0)
    made = Claude()
    made.user("x" * 10_000)
    fork = made.says("which?", "m")
    for number in range(50):
        made.says("this", f"m{number}", parent=fork)
    traces, report = read(made.data())
    assert 1 < len(traces) < 50
    assert report.notes["branches_beyond_limit"] == report.ignored["branch_left_out"] == 50 - len(traces)
    assert balanced(report)


def test_the_shared_file_is_read_as_documented(shared_data: Path) -> None:
    (path,) = (shared_data / "traces").glob("claude_code_*.jsonl")
    traces, report = read(path.read_bytes())
    calls = [call for trace in traces for message in trace.messages for call in message.calls]
    assert (len(traces), report.used, len(calls)) == (3, 53, 21)
    assert sum(call.result is not None for call in calls) == 21
    assert sum(bool(call.result and call.result.is_error) for call in calls) == 3
    assert max(len(m.calls) for trace in traces for m in trace.messages) == 3
    assert sum(m.role == "assistant" for trace in traces for m in trace.messages) == 20
    assert (report.ignored, report.skipped, report.notes) == ({}, {}, {})


def test_lines_of_another_kind_are_no_claude_code_file() -> None:
    with pytest.raises(Refused):
        read(lines([{"type": "response_item", "payload": {}}] * 3))
