"""One request to an OpenAI-compatible chat API, and what can be read from its reply.

The key of a teacher leaves this module in one header and nowhere else; sizes are bounded, and every way in which
a request can go wrong is a ``Failed``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

import httpx
from pydantic import TypeAdapter

from hintloop.envs.models import ToolCall
from hintloop.rollout.config import TeacherSpec
from hintloop.rollout.pace import seconds_to_wait

RETRY_STATUS = frozenset({408, 409, 425, 429, 500, 502, 503, 504})
MAX_ERROR_CHARS = 200
MAX_REPLY_BYTES = 1024 * 1024
MAX_CALL_CHARS = 50_000
_CALLS = TypeAdapter(list[ToolCall])
_NOT_SENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout, httpx.LocalProtocolError)


class Failed(Exception):
    """A request that gave no answer."""

    def __init__(self, said: str, *, again: bool, billed: bool, wait: float | None = None):
        super().__init__(said)
        self.again = again
        """Another attempt may do better."""
        self.billed = billed
        """It may have cost something."""
        self.wait = wait
        """Seconds after which the server wants to be asked again, if it said so."""


class ChatApi:
    """One teacher's endpoint. The HTTP client is shared and belongs to the caller."""

    def __init__(self, spec: TeacherSpec, client: httpx.AsyncClient, *, timeout_s: float) -> None:
        """``ValueError`` when the environment variable of the key is not set, or holds none."""
        self.url = chat_url(spec)
        self._client = client
        self._timeout_s = timeout_s
        self._key = _key(spec)

    async def post(self, data: bytes) -> dict[str, Any]:
        """The reply to a request body. Raises ``Failed``."""
        headers = {"Content-Type": "application/json"}
        if self._key is not None:
            headers["Authorization"] = f"Bearer {self._key}"
        try:
            async with self._client.stream(
                "POST", self.url, content=data, headers=headers, timeout=self._timeout_s
            ) as response:
                text = await _read(response)
        except httpx.HTTPError as error:
            said = f"{type(error).__name__}: {error}"
            again = isinstance(error, httpx.TransportError)
            raise Failed(self._safe(said), again=again, billed=not isinstance(error, _NOT_SENT)) from None
        status = response.status_code
        if status != 200:
            raise Failed(
                self._safe(f"HTTP {status}: {text.decode(errors='replace')}"),
                again=status in RETRY_STATUS,
                billed=status >= 500 and status != 503,  # what is refused is free, what broke off may not be
                wait=seconds_to_wait(response.headers.get("retry-after", "")),
            )
        return _parse(text)

    def _safe(self, text: str) -> str:
        """An error's text, short and without the key, which some servers repeat."""
        return (text if self._key is None else text.replace(self._key, "[key]"))[:MAX_ERROR_CHARS]


def chat_url(spec: TeacherSpec) -> str:
    """Where a teacher is asked."""
    return spec.base_url.rstrip("/") + "/chat/completions"


def _key(spec: TeacherSpec) -> str | None:
    if spec.api_key_env is None:
        return None
    key = os.environ.get(spec.api_key_env, "").strip()
    if not key:
        raise ValueError(f"teacher {spec.name}: the environment variable {spec.api_key_env} is not set")
    if not (key.isascii() and key.isprintable()) or " " in key:
        raise ValueError(f"teacher {spec.name}: the environment variable {spec.api_key_env} holds no key")
    return key


async def _read(response: httpx.Response) -> bytes:
    text = bytearray()
    async for part in response.aiter_bytes():
        text += part
        if len(text) > MAX_REPLY_BYTES:
            raise Failed(f"the answer is larger than {MAX_REPLY_BYTES} bytes", again=False, billed=True)
    return bytes(text)


def _parse(text: bytes) -> dict[str, Any]:
    try:
        reply = json.loads(text)
    except (ValueError, RecursionError):
        reply = None
    if not isinstance(reply, dict):
        raise Failed("the answer is no JSON object", again=False, billed=True)
    return reply


def usage(reply: dict[str, Any]) -> tuple[int, int] | None:
    """Tokens in and out; None when the reply does not say."""
    usage = reply.get("usage")
    if not isinstance(usage, dict):
        return None
    counts = usage.get("prompt_tokens"), usage.get("completion_tokens")
    spent_in, spent_out = (count if type(count) is int and count >= 0 else None for count in counts)
    return None if spent_in is None or spent_out is None else (spent_in, spent_out)


def parse_calls(reply: dict[str, Any]) -> tuple[ToolCall, ...]:
    """All tool calls of a chat completion: one turn. ``ValueError`` for none, or one that cannot be read."""
    try:
        functions = [call["function"] for call in reply["choices"][0]["message"]["tool_calls"]]
        given = [(function["name"], function["arguments"]) for function in functions]
        parsed = [(name, json.loads(text) if isinstance(text, str) else text) for name, text in given]
    except (KeyError, IndexError, TypeError):
        raise ValueError("the answer holds no tool call") from None
    except (ValueError, RecursionError):
        raise ValueError("the arguments of the answer's tool call are no JSON") from None
    if not parsed:
        raise ValueError("the answer holds no tool call")
    if not all(isinstance(name, str) and isinstance(arguments, dict) for name, arguments in parsed):
        raise ValueError("the answer's tool call has no name or no arguments")
    calls = tuple(ToolCall(name=name, arguments=arguments) for name, arguments in parsed)
    if len(calls_text(calls)) > MAX_CALL_CHARS:
        raise ValueError(f"the answer's tool call is longer than {MAX_CALL_CHARS} characters")
    return calls


def parse_text(reply: dict[str, Any]) -> str:
    """The text of a chat completion as one line. ``ValueError`` when there is none."""
    try:
        content = reply["choices"][0]["message"]["content"]
        content.encode()
    except (KeyError, IndexError, TypeError, AttributeError, UnicodeError):
        raise ValueError("the answer holds no text") from None
    line = " ".join(content.split())
    if not line:
        raise ValueError("the answer holds no text")
    return line


def calls_text(calls: Sequence[ToolCall]) -> str:
    """Calls as strict JSON. ``ValueError`` when they have none: NaN, or half of a surrogate pair."""
    try:
        plain = [{"name": call.name, "arguments": call.arguments} for call in calls]
        text = json.dumps(plain, allow_nan=False, ensure_ascii=False)
        text.encode()
    except (ValueError, RecursionError):
        raise ValueError("the answer's tool call is no valid JSON text") from None
    return text


def read_calls(text: str) -> tuple[ToolCall, ...]:
    """The calls of such a text. ``ValueError`` when it is none."""
    calls = tuple(_CALLS.validate_json(text))
    if not calls:
        raise ValueError("no calls")
    return calls


def read_text(text: str) -> str:
    """A written text as ``json.dumps`` gives it. ``ValueError`` when it is none."""
    found = json.loads(text)
    if not isinstance(found, str):
        raise ValueError("no text")
    return found
