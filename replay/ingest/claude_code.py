"""Claude Code: one JSON record per line, in main files and in the files of sub-agents.

See ``claude_tree`` for how records become conversations. A compaction starts a new one, because the model then
saw the summary and not what came before. Records that never reached the model (notices, snapshots, errors of
the API) only link others. What the model thought is read, but recordings hold it in part or encrypted.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, BinaryIO

from hintloop.replay.ingest.claude_tree import ASSISTANT, LINK, RESULT, USER, Step, Tree
from hintloop.replay.ingest.head import Head
from hintloop.replay.ingest.lines import Record, read_records, reread
from hintloop.replay.ingest.report import Report
from hintloop.replay.ingest.trace import Message, ToolCall, ToolResult, Trace, Usage
from hintloop.replay.ingest.values import (
    IMAGE,
    arguments_of,
    dict_of,
    integer_of,
    joined,
    list_of,
    seconds_of,
    text_of,
    unix_time,
)

MAX_TRACE_BYTES = 64 << 20
"""Records of one conversation beyond this are left out; no context of a model is that long."""
SYNTHETIC = "<synthetic>"
_NOT_MESSAGES = frozenset(
    [
        "summary",
        "attachment",
        "progress",
        "file-history-snapshot",
        "file-history-delta",
        "queue-operation",
        "last-prompt",
        "mode",
        "permission-mode",
        "ai-title",
        "custom-title",
        "agent-name",
        "agent-color",
        "agent-setting",
        "pr-link",
        "bridge-session",
        "worktree-state",
        "started",
        "result",
        "frame-link",
        "system",
    ]
)
_ENVELOPE = ("uuid", "sessionId", "parentUuid", "leafUuid", "messageId")
_EXIT_CODE = re.compile(r"\s*(?:Error: )?Exit code (\d{1,3})\b")
_INPUT_TOKENS = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
_INTERRUPTED = "[Request interrupted by user"
_NONE: tuple[str, ...] = ()
_NOTED = {"redacted_thinking": "thinking", "fallback": "fallback"}


@dataclass(frozen=True, slots=True)
class ClaudeCode:
    """The format; see ``detect.Format``."""

    name: str = "claude_code"

    def sniff(self, head: Head) -> float:
        """Share of the first records that look like its own."""
        known = sum(_looks_right(record) for record in head.records)
        return known / len(head.records) if head.records else 0.0

    def read(self, stream: BinaryIO, report: Report) -> Iterator[Trace]:
        """As ``detect.Format``. The file is read twice: once for its structure, then conversation by conversation."""
        tree = Tree()
        for record, start, size in read_records(stream, report):
            _add(tree, record, start, size, report)
        report.judge()
        for steps in tree.conversations(report):
            trace = _trace(self.name, stream, steps, report)
            if trace is not None:
                yield trace


def _looks_right(record: Record) -> bool:
    kind = text_of(record.get("type"))
    if kind in ("user", "assistant"):
        return isinstance(record.get("message"), dict) and any(name in record for name in _ENVELOPE)
    return kind in _NOT_MESSAGES and any(name in record for name in _ENVELOPE)


def _add(tree: Tree, record: Record, start: int, size: int, report: Report) -> None:
    kind, reason = _kind_of(record)
    message = {} if kind == LINK else _message_of(record)
    calls = answers = _NONE
    if isinstance(blocks := message.get("content"), list):
        if kind == ASSISTANT:
            calls = _ids(blocks, "tool_use", "id")
        else:
            answers = _ids(blocks, "tool_result", "tool_use_id")
            kind = RESULT if answers and len(answers) == len(blocks) else USER
    added = tree.add(
        start,
        size,
        kind,
        uuid=record.get("uuid"),
        parent=record.get("parentUuid"),
        side=(record.get("isSidechain") is True, text_of(record.get("agentId"))),
        message_id=message.get("id"),
        calls=calls,
        answers=answers,
    )
    if not added:
        report.ignore("duplicate_uuid")
    elif reason:
        (report.skip if reason.startswith("!") else report.ignore)(reason.lstrip("!"))
        if kept := dict_of(dict_of(record.get("compactMetadata")).get("preservedSegment")):
            tree.relink(kept.get("headUuid"), kept.get("anchorUuid"))


def _kind_of(record: Record) -> tuple[int, str]:
    """What a record is, and for a mere link why it is one; with ``!`` in front if it should not be."""
    kind = record.get("type")
    if kind == "assistant" or kind == "user":
        return _kind_of_message(record, kind)
    kind = text_of(kind)
    if kind == "system":
        return LINK, f"system:{text_of(record.get('subtype')) or 'notice'}"
    if kind == "attachment":
        attachment = dict_of(record.get("attachment"))
        if attachment.get("type") == "queued_command" and attachment.get("prompt"):
            return USER, ""
        return LINK, f"attachment:{text_of(attachment.get('type')) or 'other'}"
    return LINK, kind if kind in _NOT_MESSAGES else "!unknown_type"


def _kind_of_message(record: Record, kind: str) -> tuple[int, str]:
    message = record.get("message")
    if not isinstance(message, dict) or not isinstance(message.get("content"), (list, str)):
        return LINK, "!malformed_message"
    if record.get("isApiErrorMessage") or message.get("model") == SYNTHETIC:
        return LINK, "api_error" if record.get("isApiErrorMessage") else "synthetic_message"
    if kind == "assistant":
        return ASSISTANT, ""
    if record.get("isVisibleInTranscriptOnly") and not record.get("isCompactSummary"):
        return LINK, "shown_only"
    return USER, ""


def _message_of(record: Record) -> dict[str, Any]:
    """The message; that of a prompt which was typed while the model worked is made up from its attachment."""
    message = record.get("message")
    if isinstance(message, dict) and record.get("type") != "attachment":
        return message
    return {"role": "user", "content": dict_of(record.get("attachment")).get("prompt")}


def _ids(blocks: list[Any], kind: str, name: str) -> tuple[str, ...]:
    found = [
        each
        for block in blocks
        if isinstance(block, dict) and block.get("type") == kind and isinstance(each := block.get(name), str)
    ]
    return tuple(found)


def _trace(source: str, stream: BinaryIO, steps: Sequence[Step], report: Report) -> Trace | None:
    messages: list[Message] = []
    versions: dict[str, None] = {}
    session, branch, taken = "", "", 0
    for number, step in enumerate(steps):
        taken += sum([size for _, size in step.places])
        if taken > MAX_TRACE_BYTES:
            report.note("messages_beyond_limit", len(steps) - number)
            break
        records = [reread(stream, start, size) for start, size in step.places]
        first = records[0]
        session = text_of(first.get("sessionId")) or session
        versions[text_of(first.get("version"))] = None
        if not branch and not step.copied:
            branch = text_of(first.get("uuid"))[:8] or f"byte{step.places[0][0]}"
            branch = f"side-{branch}" if first.get("isSidechain") is True else branch
        notes = Report() if step.copied else report
        message = _assistant(records, notes) if step.kind == ASSISTANT else _user(first, notes)
        if message.text or message.calls:
            messages.append(replace(message, copied=True) if step.copied else message)
        else:
            notes.note("empty_message")
    if not any(message.role == "assistant" for message in messages):
        report.note("conversation_without_answer")
        return None
    return Trace(source, session, branch, tuple(messages), tuple(version for version in versions if version))


def _user(record: Record, report: Report) -> Message:
    content = _message_of(record).get("content")
    parts = []
    for block in [content] if isinstance(content, str) else list_of(content):
        kind = text_of(dict_of(block).get("type"))
        if isinstance(block, str):
            parts.append(block)
        elif kind == "text":
            parts.append(text_of(block.get("text")))
        elif kind in ("image", "document"):
            report.note(kind)
            parts.append(f"[{kind}]")
        elif kind != "tool_result":
            report.note("unknown_block")
    report.note("interrupted", sum(part.startswith(_INTERRUPTED) for part in parts))
    return Message("user", joined(parts), timestamp=unix_time(record.get("timestamp")))


def _assistant(records: Sequence[Record], report: Report) -> Message:
    """One message of the model from all of its records and those with the results of its calls."""
    texts, thoughts, model = [], [], ""
    usage: dict[str, Any] = {}
    calls: dict[str, tuple[str, str]] = {}
    results: dict[str, ToolResult] = {}
    for record in records:
        if record.get("type") != "assistant":
            _take_results(record, results, report)
            continue
        message = _message_of(record)
        model = model or text_of(message.get("model"))
        usage = dict_of(message.get("usage")) or usage
        content = message.get("content")
        for block in [{"type": "text", "text": content}] if isinstance(content, str) else list_of(content):
            kind = block.get("type") if isinstance(block, dict) else None
            if kind == "text":
                text = text_of(block.get("text"))
                if text in texts:
                    # A resumed session wrote the record again, under another uuid.
                    report.note("repeated_text")
                else:
                    texts.append(text)
            elif kind == "tool_use" and isinstance(block.get("id"), str):
                name = text_of(block.get("name"))
                calls.setdefault(block["id"], (name, arguments_of(block.get("input"))))
                if not name:
                    report.note("call_without_name")
            elif kind == "thinking":
                thoughts.append(text_of(block.get("thinking")))
                report.note("thinking")
            else:
                report.note(_NOTED.get(text_of(kind), "unknown_block"))
    report.note("call_without_result", len(calls.keys() - results.keys()))
    return Message(
        "assistant",
        joined(texts),
        tuple(ToolCall(key, name, given, results.get(key)) for key, (name, given) in calls.items()),
        thinking=joined(thoughts),
        timestamp=unix_time(records[0].get("timestamp")),
        model=model,
        usage=_usage(usage),
    )


def _take_results(record: Record, results: dict[str, ToolResult], report: Report) -> None:
    for block in map(dict_of, list_of(_message_of(record).get("content"))):
        call_id = block.get("tool_use_id")
        if block.get("type") != "tool_result" or not isinstance(call_id, str):
            continue
        if call_id in results:
            report.note("repeated_result")
            continue
        results[call_id] = _result(record, block, report)


def _result(record: Record, block: dict[str, Any], report: Report) -> ToolResult:
    text = _result_text(block.get("content"), report)
    said = record.get("toolUseResult")
    flag = block.get("is_error")
    failed = flag if isinstance(flag, bool) else None
    if failed is None and isinstance(said, str) and said.startswith("Error: "):
        failed = True
    details = dict_of(said)
    code = _EXIT_CODE.match(text) if failed else None
    return ToolResult(
        text,
        is_error=failed,
        exit_code=int(code[1]) if code else None,
        seconds=seconds_of(details.get("durationMs")) / 1000,
        refused=bool(record.get("toolDenialKind")) or details.get("interrupted") is True,
    )


def _result_text(content: Any, report: Report) -> str:
    if isinstance(content, str):
        return content
    parts = []
    for block in list_of(content):
        kind = text_of(dict_of(block).get("type"))
        if kind == "text":
            parts.append(text_of(block.get("text")))
        elif kind == "image":
            report.note("image")
            parts.append(IMAGE)
        elif kind == "tool_reference":
            parts.append(text_of(block.get("tool_name")))
        else:
            report.note("unknown_block")
    return joined(parts)


def _usage(usage: dict[str, Any]) -> Usage | None:
    if not usage:
        return None
    read = [integer_of(usage.get(name)) or 0 for name in _INPUT_TOKENS]
    return Usage(sum(read), integer_of(usage.get("output_tokens")) or 0)
