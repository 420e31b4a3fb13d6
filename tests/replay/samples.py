"""A small file of each form of each format: a prompt, a failed call, a good one, a last word."""

from __future__ import annotations

import json
from typing import Any

from .recordings import Record, lines, small_claude, small_codex

FAILED = "bash: lss: command not found"


def document(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode()


# Gemini CLI


def gemini_message(kind: str, number: int, content: Any = "", **more: Any) -> Record:
    return {
        "id": f"m{number}",
        "timestamp": f"2025-10-21T20:04:{number:02d}.000Z",
        "type": kind,
        "content": content,
        **more,
    }


def gemini_call(call_id: str, output: Any = None, status: str = "success", **more: Any) -> Record:
    given = {"error": output} if status == "error" else {"output": output}
    answer = {"functionResponse": {"id": call_id, "name": "run_shell_command", "response": given}}
    call = {"id": call_id, "name": "run_shell_command", "args": {"command": "ls"}, "status": status}
    return {**call, "result": [answer], "timestamp": "2025-10-21T20:04:39Z", **more}


def gemini_messages() -> list[Record]:
    failed = gemini_call("c1", f"Output: {FAILED}\nExit Code: 127")
    tokens = {"input": 10, "output": 2, "cached": 0, "thoughts": 3, "tool": 0, "total": 15}
    thought = {"subject": "Plan", "description": "look", "timestamp": "2025-10-21T20:04:24Z"}
    return [
        gemini_message("user", 1, "list the files"),
        gemini_message(
            "gemini", 2, "I look.", toolCalls=[failed], thoughts=[thought], tokens=tokens, model="gemini-x"
        ),
        gemini_message("gemini", 3, "", toolCalls=[gemini_call("c2", "Output: a.py")], model="gemini-x"),
        gemini_message("info", 4, "a notice"),
        gemini_message("gemini", 5, "There is a.py", model="gemini-x"),
    ]


GEMINI_META = {"sessionId": "g1", "projectHash": "h", "startTime": "2025-10-21T20:04:20Z", "lastUpdated": "x"}


def gemini_document() -> Record:
    return {**GEMINI_META, "messages": gemini_messages()}


def gemini_lines() -> list[Record]:
    return [{**GEMINI_META, "kind": "main"}, *gemini_messages(), {"$set": {"lastUpdated": "y"}}]


# OpenHands


def oh_event(kind: str, number: int, source: str = "agent", **more: Any) -> Record:
    return {
        "id": f"e{number:07d}",
        "timestamp": f"2026-06-16T05:39:{number:02d}",
        "source": source,
        "kind": kind,
        **more,
    }


def oh_text(text: str) -> list[Record]:
    return [{"cache_prompt": False, "type": "text", "text": text}]


def oh_user(number: int, text: str, **more: Any) -> Record:
    message = {"role": "user", "content": oh_text(text)}
    return oh_event("MessageEvent", number, "user", llm_message=message, **more)


def oh_action(number: int, call_id: str, response: str, **more: Any) -> Record:
    call = {"id": call_id, "name": "terminal", "arguments": '{"command": "ls"}', "origin": "completion"}
    given: Record = {
        "thought": oh_text(""),
        "action": {"command": "ls", "kind": "TerminalAction"},
        "tool_name": "terminal",
        "tool_call_id": call_id,
        "tool_call": call,
        "llm_response_id": response,
    }
    return oh_event("ActionEvent", number, **{**given, **more})


def oh_seen(
    number: int, call_id: str, text: str, code: int | None = 0, error: bool = False, **more: Any
) -> Record:
    seen = {"content": oh_text(text), "is_error": error, "command": "ls", "exit_code": code, "timeout": False,
            "metadata": {"exit_code": -1 if code is None else code, "username": "me", "hostname": "h"},
            "kind": "TerminalObservation"}  # fmt: skip
    return oh_event(
        "ObservationEvent", number, "environment", tool_name="terminal", tool_call_id=call_id, observation=seen,
        action_id="x", **more,
    )  # fmt: skip


def oh_events() -> list[Record]:
    prompt = {"type": "text", "text": "You are an agent"}
    last = {"role": "assistant", "content": oh_text("There is a.py")}
    return [
        oh_event("SystemPromptEvent", 1, system_prompt=prompt, tools=[{"name": "terminal"}]),
        oh_user(2, "list the files"),
        oh_event("ConversationStateUpdateEvent", 3, "environment", key="stats", value={}),
        oh_action(4, "c1", "r1", thought=oh_text("I look.")),
        oh_seen(5, "c1", FAILED, 127),
        oh_action(6, "c2", "r2"),
        oh_seen(7, "c2", "a.py"),
        oh_event("MessageEvent", 8, llm_message=last, llm_response_id="r3"),
    ]


OH_STATE = {
    "id": "conversation-1",
    "agent": {"llm": {"model": "gpt-x"}, "kind": "Agent"},
    "execution_status": "idle",
}


# OpenHands V0


def v0_action(
    number: int, action: str, source: str = "agent", call: str = "", response: str = "", **args: Any
) -> Record:
    event: Record = {"id": number, "timestamp": f"2025-03-01T10:00:{number:02d}", "source": source, "message": "m",
                     "action": action, "args": args}  # fmt: skip
    if call:
        function = {"name": "execute_bash", "arguments": '{"command": "ls"}'}
        message = {
            "role": "assistant",
            "tool_calls": [{"id": call, "type": "function", "function": function}],
        }
        event["tool_call_metadata"] = {
            "function_name": "execute_bash",
            "tool_call_id": call,
            "model_response": {
                "id": response or f"r{number}",
                "model": "claude-x",
                "choices": [{"message": message}],
                "usage": {"prompt_tokens": 7, "completion_tokens": 3},
            },
        }
    return event


def v0_seen(
    number: int, cause: int, content: str, code: int | None = 0, seen: str = "run", **more: Any
) -> Record:
    extras = {"command": "ls", "metadata": {"exit_code": code, "username": "me", "hostname": "h"}}
    return {"id": number, "timestamp": f"2025-03-01T10:00:{number:02d}", "source": "agent", "message": "m",
            "cause": cause, "observation": seen, "content": content, "extras": extras, **more}  # fmt: skip


def v0_events() -> list[Record]:
    return [
        v0_action(0, "system", content="You are an agent"),
        v0_action(1, "message", "user", content="list the files"),
        {"id": 2, "source": "environment", "observation": "agent_state_changed", "content": "", "extras": {}},
        v0_action(3, "run", call="c1", command="lss", thought="I look."),
        v0_seen(4, 3, FAILED, 127, success=False),
        v0_action(5, "run", call="c2", command="ls", thought=""),
        v0_seen(6, 5, "a.py"),
        v0_action(7, "message", content="There is a.py"),
    ]


def v0_row() -> Record:
    return {"instance_id": "i1", "instruction": "list the files", "git_patch": "", "history": v0_events(),
            "metrics": {}, "success": True, "error": None}  # fmt: skip


# SWE-agent


def swe_prompt(text: str) -> str:
    return f"{text}\n(Open file: n/a)\n(Current directory: /w)\nbash-$"


def swe_history() -> list[Record]:
    call = {"id": "c2", "type": "function", "function": {"name": "bash", "arguments": '{"command":"ls"}'}}
    return [
        {"role": "system", "content": "SETTING", "agent": "main", "message_type": "system_prompt"},
        {"role": "user", "content": "list the files", "agent": "main", "message_type": "observation"},
        {"role": "assistant", "content": "I look.\n```\nlss\n```", "thought": "I look.", "action": "lss\n",
         "agent": "main", "message_type": "action"},
        {"role": "user", "content": swe_prompt(FAILED), "agent": "main", "message_type": "observation"},
        {"role": "assistant", "content": "Again.", "thought": "Again.", "action": "ls", "agent": "main",
         "tool_calls": [call], "message_type": "action"},
        {"role": "tool", "content": swe_prompt("a.py\r\nb.py"), "agent": "main", "message_type": "observation",
         "tool_call_ids": ["c2"]},
    ]  # fmt: skip


def swe_step(action: str, observation: str, **more: Any) -> Record:
    return {"action": action, "observation": observation, "response": "x", "thought": "x", "execution_time": 0.5,
            "state": {"open_file": "n/a"}, **more}  # fmt: skip


def swe_document() -> Record:
    steps = [swe_step("lss\n", FAILED), swe_step("ls", "a.py\r\nb.py")]
    info = {"exit_status": "submitted", "submission": "", "swe_agent_version": "1.1.0"}
    return {
        "environment": "main",
        "trajectory": steps,
        "history": swe_history(),
        "info": info,
        "replay_config": "{}",
    }


# mini-swe-agent


def mini_assistant(command: str, call_id: str = "", text: str = "I look.", **extra: Any) -> Record:
    actions = [{"command": command, **({"tool_call_id": call_id} if call_id else {})}]
    message: Record = {"role": "assistant", "content": text, "extra": {"actions": actions, **extra}}
    if call_id:
        function = {"name": "bash", "arguments": json.dumps({"command": command})}
        message["tool_calls"] = [{"id": call_id, "type": "function", "function": function}]
    return message


def mini_seen(text: str, code: int, call_id: str = "", info: str = "", **extra: Any) -> Record:
    found = {"raw_output": text, "returncode": code, "exception_info": info, **extra}
    message: Record = {"role": "tool" if call_id else "user", "content": text, "extra": found}
    return {**message, "tool_call_id": call_id} if call_id else message


def mini_messages() -> list[Record]:
    return [
        {"role": "system", "content": "SETTING"},
        {"role": "user", "content": "list the files"},
        mini_assistant("lss", "c1"),
        mini_seen(FAILED, 127, "c1"),
        mini_assistant("ls", text="Again.\n```mswea_bash_command\nls\n```"),
        mini_seen("a.py", 0),
        {"role": "exit", "content": "done", "extra": {"exit_status": "Submitted", "submission": ""}},
    ]


def mini_document(messages: list[Record] | None = None) -> Record:
    info = {
        "exit_status": "Submitted",
        "mini_version": "2.1.0",
        "config": {"model": {"model_name": "claude-x"}},
    }
    found = mini_messages() if messages is None else messages
    return {"info": info, "messages": found, "trajectory_format": "mini-swe-agent-1.1"}


def mini_v1() -> list[Record]:
    return [
        {"role": "system", "content": "SETTING"},
        {"role": "user", "content": "list the files"},
        {"role": "assistant", "content": "I look.\n\n```mswea_bash_command\nlss\n```"},
        {"role": "user", "content": f"<returncode>127</returncode>\n<output>\n{FAILED}\n</output>"},
        {"role": "assistant", "content": "Done.\n```bash\necho COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT\n```"},
        {"role": "user", "content": ""},
    ]


# ATIF


def atif_call(call_id: str, **more: Any) -> Record:
    return {"tool_call_id": call_id, "function_name": "bash", "arguments": {"command": "ls"}, **more}


def atif_step(number: int, source: str, message: Any = "", **more: Any) -> Record:
    step = {
        "step_id": number,
        "timestamp": f"2025-10-16T14:30:{number:02d}Z",
        "source": source,
        "message": message,
    }
    return {**step, **more}


def atif_document() -> Record:
    failed = {"source_call_id": "c1", "content": FAILED, "extra": {"tool_result_is_error": True}}
    metrics = {"prompt_tokens": 9, "completion_tokens": 4, "cached_tokens": 1}
    return {
        "schema_version": "ATIF-v1.8",
        "session_id": "a1",
        "agent": {"name": "harbor", "version": "1", "model_name": "gpt-x", "tool_definitions": [{"type": "function"}]},
        "steps": [
            atif_step(1, "system", "SETTING"),
            atif_step(2, "user", [{"type": "text", "text": "list the files"}]),
            atif_step(3, "agent", "I look.", reasoning_content="hm", tool_calls=[atif_call("c1")],
                      observation={"results": [failed]}, metrics=metrics),
            atif_step(4, "agent", "", tool_calls=[atif_call("c2")], model_name="gpt-y",
                      observation={"results": [{"source_call_id": "c2", "content": "a.py"}]}),
            atif_step(5, "agent", "There is a.py"),
        ],
        "final_metrics": {"total_steps": 5},
    }  # fmt: skip


# OpenAI-style messages


def chat_call(call_id: str, name: str = "bash", arguments: Any = '{"command":"ls"}') -> Record:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def chat_messages() -> list[Record]:
    return [
        {"role": "system", "content": "SETTING"},
        {"role": "user", "content": [{"type": "text", "text": "list the files"}]},
        {"role": "assistant", "content": "I look.", "tool_calls": [chat_call("c1")]},
        {"role": "tool", "tool_call_id": "c1", "content": f"Error: {FAILED}"},
        {"role": "assistant", "content": None, "tool_calls": [chat_call("c2", arguments={"command": "ls"})]},
        {"role": "tool", "tool_call_id": "c2", "content": "a.py"},
        {"role": "assistant", "content": "There is a.py"},
    ]


def chat_row() -> Record:
    return {
        "id": "row-1",
        "messages": chat_messages(),
        "tools": [{"type": "function", "function": {"name": "bash"}}],
    }


# OpenEnv


def openenv_episode(reward: float | None = 1.0, done: bool = True) -> Record:
    results = [{"data": None, "done": False, "metadata": {}, "error": FAILED},
               {"data": "a.py", "done": True, "metadata": {}, "error": None}]  # fmt: skip
    messages = chat_messages()
    messages[3] = {**messages[3], "content": "null", "name": "bash"}
    return {
        "episode_id": "ep-000001",
        "messages": messages,
        "reward": reward,
        "done": done,
        "tool_trace": [{"tool_name": "bash", "arguments": {}, "result": result} for result in results],
        "metrics": {},
        "verify_metrics": {},
        "artifacts": {},
        "task": "t",
        "extra": {},
    }


def openenv_turn(number: int, sent: int, mask: list[int] | None = None) -> Record:
    """The model call that was sent the first ``sent`` chat messages and gave the next."""
    messages = chat_messages()
    return {
        "node_id": f"n{number}",
        "prompt_token_ids": [1, 2],
        "completion_token_ids": [3],
        "per_token_logps": [-0.5],
        "loss_mask": [0, 0, 1] if mask is None else mask,
        "request": {"messages": messages[:sent], "tools": None},
        "response": {"choices": [{"message": messages[sent], "finish_reason": "stop"}]},
        "metadata": {"node_id": f"n{number}", "model": "qwen-x"},
    }


def openenv_trace() -> Record:
    return {"schema_version": 1, "turns": [openenv_turn(0, 2), openenv_turn(1, 4), openenv_turn(2, 6)]}


def openenv_capture() -> Record:
    turns: list[Record] = []
    for each in openenv_trace()["turns"]:
        answer = each["response"]["choices"][0]["message"]
        captured = {"request_messages": each["request"]["messages"], "response_message": answer}
        turns.append({"node_id": each["node_id"], "index": len(turns), "discarded": False, **captured})
    sequences = [{"role": "agent", "node_ids": ["n0", "n1", "n2"]}]
    return {"session_id": "cap-1", "turns": turns, "sequences": sequences, "stats": {}, "trainable": True}


FORMS: dict[str, tuple[str, list[Any]]] = {
    "claude_code lines": ("claude_code", small_claude().records),
    "codex lines": ("codex", small_codex()),
    "gemini_cli lines": ("gemini_cli", gemini_lines()),
    "openhands lines": ("openhands", oh_events()),
    "openhands rows": ("openhands", [{"instance_id": "i1", "history": oh_events()}]),
    "openhands_v0 lines": ("openhands_v0", v0_events()),
    "openhands_v0 rows": ("openhands_v0", [v0_row(), v0_row()]),
    "atif lines": ("atif", [atif_document(), atif_document()]),
    "openai_messages rows": ("openai_messages", [chat_row(), chat_row()]),
    "openai_messages lines": ("openai_messages", chat_messages()),
    "openenv rows": ("openenv", [openenv_episode(), openenv_episode(0.0)]),
    "openenv traces": ("openenv", [openenv_trace(), openenv_trace()]),
}
"""By name of the form: the format, and the records that are a line each."""
DOCUMENTS: dict[str, tuple[str, Any]] = {
    "gemini_cli document": ("gemini_cli", gemini_document()),
    "openhands event": ("openhands", oh_events()[1]),
    "openhands array": ("openhands", oh_events()),
    "openhands state": ("openhands", OH_STATE),
    "openhands_v0 array": ("openhands_v0", v0_events()),
    "openhands_v0 export": ("openhands_v0", {"trajectory": v0_events()}),
    "openhands_v0 row": ("openhands_v0", v0_row()),
    "swe_agent document": ("swe_agent", swe_document()),
    "swe_agent history": ("swe_agent", {"history": swe_history()}),
    "swe_agent steps": ("swe_agent", {"trajectory": swe_document()["trajectory"]}),
    "mini_swe_agent document": ("mini_swe_agent", mini_document()),
    "mini_swe_agent list": ("mini_swe_agent", mini_v1()),
    "atif document": ("atif", atif_document()),
    "openai_messages document": ("openai_messages", chat_row()),
    "openai_messages list": ("openai_messages", chat_messages()),
    "openai_messages array": ("openai_messages", [chat_row(), chat_row()]),
    "openenv trace": ("openenv", openenv_trace()),
    "openenv calls": ("openenv", openenv_trace()["turns"]),
    "openenv capture": ("openenv", openenv_capture()),
    "openenv episode": ("openenv", openenv_episode()),
}
"""By name of the form: the format, and the value that the file is."""


def files() -> dict[str, tuple[str, bytes]]:
    """Every form: the format, and the bytes of the file. Documents also over many lines."""
    found = {name: (format, lines(records)) for name, (format, records) in FORMS.items()}
    for name, (format, value) in DOCUMENTS.items():
        found[name] = (format, document(value))
        found[f"{name}, indented"] = (format, json.dumps(value, indent=2).encode())
    return found
