"""OpenAI chat messages: as an agent program sends them, as renderers take them, and what a model said as one."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from renderers import ToolCallParseStatus

from hintloop.agent.conversation import Message
from hintloop.agent.engine import NEUTRAL, Sample
from hintloop.envs.models import ToolCall

Key = tuple[str, str, str]
"""Role, text and calls of a message: equal for two that say the same."""
_SHAPING: dict[str, tuple[Any, ...]] = {
    **{name: (None, value) for name, value in NEUTRAL.items()},
    "top_k": (None, 0, -1),
    "temperature": (None,),
    "logit_bias": (None, {}),
}
"""What a request may ask for that changes which tokens are likely, and the values that change nothing."""
_READABLE = (ToolCallParseStatus.OK, ToolCallParseStatus.UNKNOWN_TOOL)


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """What an agent program asks to be continued."""

    sent: tuple[Message, ...]
    """As it was sent, in the OpenAI form."""
    messages: tuple[Message, ...]
    """As renderers take it: text contents, arguments as objects."""
    keys: tuple[Key, ...]
    tools: tuple[dict[str, Any], ...]
    """Function specs: ``name``, ``description``, ``parameters``."""
    max_tokens: int | None
    """The longest answer that is wanted; None: no wish."""
    sampling: Mapping[str, Any]
    """Settings that would shape the probabilities otherwise than a run does, by name; a temperature is always here."""
    token_ids: bool
    """Whether ids and log-probabilities are wanted in the answer, as from vLLM."""


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer of the model, for the program that asked."""

    message: Message
    """In the OpenAI form."""
    key: Key
    calls: tuple[ToolCall, ...]
    """The tool calls in it that can be read."""
    broken: str | None
    """What was meant as a tool call, where none can be read."""


def read_request(body: Mapping[str, Any]) -> ChatRequest:
    """A chat completion request. ``ValueError`` for what no model here could be asked."""
    sent = body.get("messages")
    if not isinstance(sent, list) or not sent or not all(isinstance(message, dict) for message in sent):
        raise ValueError("messages must be a list of objects, and not empty")
    if body.get("n", 1) != 1:
        raise ValueError("one answer at a time: n must be 1")
    names: dict[str, str] = {}
    messages = tuple(_read_message(message, names) for message in sent)
    longest = body.get("max_tokens") or body.get("max_completion_tokens")
    return ChatRequest(
        sent=tuple(sent),
        messages=messages,
        keys=tuple(key_of(message) for message in messages),
        tools=tuple(_read_tool(tool) for tool in body.get("tools") or ()),
        max_tokens=longest if isinstance(longest, int) and longest > 0 else None,
        sampling={name: body[name] for name, neutral in _SHAPING.items() if body.get(name) not in neutral},
        token_ids=body.get("return_token_ids") is True,
    )


def key_of(message: Message) -> Key:
    """What a message in the renderers' form says. An assistant's text counts without the space around it."""
    calls = [call["function"] for call in message.get("tool_calls", ())]
    text = message["content"]
    if message["role"] == "assistant":
        text = text.strip()
    return message["role"], text, json.dumps(calls, sort_keys=True) if calls else ""


def read_reply(parsed: Any, text: str, tools: Sequence[Mapping[str, Any]], number: int) -> Reply:
    """The answer number ``number`` of an episode: ``parsed`` by a renderer, ``text`` with all that it wrote.

    Without ``tools`` all of it is text, for the program to read.
    """
    tried = parsed.tool_calls if tools else []
    readable = [
        call for call in tried if call.status in _READABLE and call.name and isinstance(call.arguments, dict)
    ]
    calls = tuple(ToolCall(name=call.name, arguments=call.arguments) for call in readable)
    plain = bool(parsed.tool_calls) and not calls
    message: Message = {"role": "assistant", "content": text if plain else parsed.content or ""}
    if parsed.reasoning_content and not plain:
        message["reasoning_content"] = parsed.reasoning_content
    functions = [{"name": call.name, "arguments": call.arguments} for call in calls]
    key = key_of({**message, "tool_calls": [{"function": function} for function in functions]})
    if calls:
        message["tool_calls"] = [
            {
                "id": call.id or f"call_{number}_{place}",  # Kimi's own comes back in front of the result
                "type": "function",
                "function": {**function, "arguments": json.dumps(function["arguments"])},
            }
            for place, (call, function) in enumerate(zip(readable, functions, strict=True))
        ]
    return Reply(message, key, calls, tried[0].raw if tried and not calls else None)


def completion(reply: Reply, sample: Sample, prompt_ids: Sequence[int], *, model: str, ids: bool) -> Message:
    """The answer as a chat completion; with ``ids`` the token ids and log-probabilities are in it, as from vLLM."""
    stopped = "tool_calls" if reply.calls else "stop"
    choice: dict[str, Any] = {
        "index": 0,
        "message": reply.message,
        "finish_reason": "length" if sample.finish_reason == "length" else stopped,
        "logprobs": None,
    }
    made = {
        "id": f"chatcmpl-{time.time_ns()}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "choices": [choice],
        "usage": {
            "prompt_tokens": len(prompt_ids),
            "completion_tokens": len(sample.token_ids),
            "total_tokens": len(prompt_ids) + len(sample.token_ids),
        },
    }
    if ids:
        pairs = zip(sample.token_ids, sample.logprobs, strict=True)
        content = [
            {"token": f"token_id:{token}", "logprob": value, "top_logprobs": []} for token, value in pairs
        ]
        choice |= {"token_ids": list(sample.token_ids), "logprobs": {"content": content}}
        made["prompt_token_ids"] = list(prompt_ids)
    return made


def closing(text: str, *, model: str) -> Message:
    """A chat completion that says that there are no more: a plain text ends the loop of most agents."""
    message = {"role": "assistant", "content": text}
    reply = Reply(message, key_of(message), (), None)
    return completion(reply, Sample((), (), (), "stop"), (), model=model, ids=False)


def _read_message(message: Mapping[str, Any], names: dict[str, str]) -> Message:
    """``names``: the tools that were called so far, by the id of the call."""
    role = "system" if message.get("role") == "developer" else message.get("role")
    if role not in ("system", "user", "assistant", "tool"):
        raise ValueError(f"no messages of the role {role!r} here")
    read: Message = {"role": role, "content": _text(message.get("content"))}
    if role == "assistant":
        if calls := [_read_call(call, names) for call in message.get("tool_calls") or ()]:
            read["tool_calls"] = calls
        if isinstance(message.get("reasoning_content"), str):
            read["reasoning_content"] = message["reasoning_content"]
    elif role == "tool":
        read["tool_call_id"] = message.get("tool_call_id")
        if name := message.get("name") or names.get(str(read["tool_call_id"])):
            read["name"] = name
    return read


def _read_call(call: Any, names: dict[str, str]) -> dict[str, Any]:
    try:
        function = call["function"]
        name, arguments = str(function["name"]), function.get("arguments") or "{}"
    except (KeyError, TypeError, AttributeError):
        raise ValueError("a tool call has a function with a name") from None
    parsed = json.loads(arguments) if isinstance(arguments, str) else arguments
    if not isinstance(parsed, dict):
        raise ValueError(f"the arguments of the call of {name!r} are no object")
    names[str(call.get("id"))] = name
    return {"id": call.get("id"), "type": "function", "function": {"name": name, "arguments": parsed}}


def _read_tool(tool: Any) -> dict[str, Any]:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError("tools are functions with a name")
    return {
        "name": function["name"],
        "description": function.get("description") or "",
        "parameters": function.get("parameters") or {"type": "object", "properties": {}},
    }


def _text(content: Any) -> str:
    """The text of a message's content. ``ValueError`` where there is anything else in it."""
    if content is None or isinstance(content, str):
        return content or ""
    parts = content if isinstance(content, list) else [content]
    for part in parts:
        if not isinstance(part, dict) or not isinstance(part.get("text"), str):
            raise ValueError("only text can be in a message")
    return "".join(part["text"] for part in parts)
