"""Small recordings as the tools write them, and a way to read them."""

from __future__ import annotations

import io
import json
from typing import Any

from hintloop.replay.ingest.detect import FORMATS
from hintloop.replay.ingest.report import Report
from hintloop.replay.ingest.trace import Trace

Record = dict[str, Any]
SESSION = "5c0375b4-57a5-4f26-b12d-d022ee4e51b7"


class Claude:
    """Writes a Claude Code file record by record; each follows the last unless ``parent`` says otherwise."""

    def __init__(self, session: str = SESSION) -> None:
        self.records: list[Record] = []
        self.session = session
        self.last: str | None = None

    def add(self, kind: str, message: Record | None = None, **more: Any) -> str:
        uuid = more.pop("uuid", f"{len(self.records):08d}-uuid")
        record: Record = {
            "parentUuid": more.pop("parent", self.last),
            "isSidechain": False,
            "sessionId": self.session,
            "version": "2.1.206",
            "type": kind,
            "uuid": uuid,
            "timestamp": f"2025-09-07T09:52:{len(self.records) % 60:02d}.500Z",
            **({} if message is None else {"message": message}),
            **more,
        }
        self.records.append(record)
        self.last = uuid
        return str(uuid)

    def user(self, content: Any, **more: Any) -> str:
        return self.add("user", {"role": "user", "content": content}, **more)

    def says(self, text: str, message_id: str, **more: Any) -> str:
        return self.answer([{"type": "text", "text": text}], message_id, **more)

    def calls(self, call_id: str, message_id: str, name: str = "Bash", given: Any = None, **more: Any) -> str:
        given = {"command": "ls"} if given is None else given
        block = {"type": "tool_use", "id": call_id, "name": name, "input": given}
        return self.answer([block], message_id, **more)

    def answer(self, blocks: list[Any], message_id: str, **more: Any) -> str:
        usage = more.pop("usage", {"input_tokens": 1, "output_tokens": 2})
        model = more.pop("model", "claude-x")
        message = {
            "id": message_id,
            "role": "assistant",
            "model": model,
            "content": blocks,
            "usage": usage,
        }
        return self.add("assistant", message, **more)

    def gets(self, call_id: str, content: Any = "ok", is_error: bool | None = None, **more: Any) -> str:
        block: Record = {"type": "tool_result", "tool_use_id": call_id, "content": content}
        if is_error is not None:
            block["is_error"] = is_error
        return self.user([block], **more)

    def data(self) -> bytes:
        return lines(self.records)


def lines(records: list[Any]) -> bytes:
    return b"".join(json.dumps(record, ensure_ascii=False).encode() + b"\n" for record in records)


def small_claude() -> Claude:
    """A prompt, a failed command, a good one, and a last word."""
    made = Claude()
    made.user("list the files")
    made.calls("c1", "m1", given={"command": "lss"})
    made.gets("c1", "Exit code 127\nbash: lss: command not found", True)
    made.calls("c2", "m2")
    made.gets("c2", "a.py")
    made.says("There is a.py", "m3")
    return made


def codex_meta(session: str = "s1", **more: Any) -> Record:
    return codex(
        "session_meta",
        {"id": session, "cwd": "/w", "cli_version": "0.47.0", "instructions": None, **more},
    )


def codex(kind: str, payload: Record) -> Record:
    return {"timestamp": "2025-10-21T20:02:50.705Z", "type": kind, "payload": payload}


def item(kind: str, **fields: Any) -> Record:
    return codex("response_item", {"type": kind, **fields})


def said(role: str, text: str) -> Record:
    kind = "output_text" if role == "assistant" else "input_text"
    return item("message", role=role, content=[{"type": kind, "text": text}])


def small_codex() -> list[Record]:
    """A prompt, a failed patch, a good command, and a last word."""
    output = json.dumps({"output": "a.py\n", "metadata": {"exit_code": 0, "duration_seconds": 1.5}})
    return [
        codex_meta(),
        codex("turn_context", {"model": "gpt-5-codex"}),
        said("user", "<environment_context>x</environment_context>"),
        said("user", "patch it"),
        item("reasoning", summary=[{"type": "summary_text", "text": "hm"}], encrypted_content="gAAAA"),
        item("custom_tool_call", name="apply_patch", input="*** Begin Patch", call_id="c1"),
        item(
            "custom_tool_call_output", call_id="c1", output="apply_patch verification failed: no such lines"
        ),
        item("function_call", name="shell", arguments='{"command":["ls"]}', call_id="c2"),
        item("function_call_output", call_id="c2", output=output),
        codex("event_msg", {"type": "agent_message", "message": "done"}),
        said("assistant", "done"),
    ]


def read(data: bytes, format: str = "claude_code") -> tuple[list[Trace], Report]:
    report = Report()
    return list(FORMATS[format].read(io.BytesIO(data), report)), report


def balanced(report: Report) -> bool:
    """Every record is used, ignored or skipped."""
    return report.read == report.used + sum(report.ignored.values()) + sum(report.skipped.values())
