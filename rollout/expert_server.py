"""The scripted expert behind an OpenAI-compatible endpoint, so that it is asked exactly as a real teacher is.

``python -m hintloop.rollout.expert_server --ready-file F`` serves on a free loopback port; ``F`` then holds
the URL, as with the environment server.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from hintloop.envs.models import ToolCall

Expert = Callable[[Sequence[dict[str, Any]]], ToolCall | None]
"""OpenAI-style transcript -> the next call, or None when the expert does not know the task."""

MODEL = "expert"
MAX_BODY_BYTES = 4 * 1024 * 1024
_CHARS_PER_TOKEN = 4
"""Rough, and only for the usage numbers."""


def create_app(expert: Expert) -> Starlette:
    """``POST /v1/chat/completions``, ``GET /v1/models`` and ``GET /health``."""

    async def complete(request: Request) -> Response:
        if int(request.headers.get("content-length") or 0) > MAX_BODY_BYTES:
            return _refuse(413, "the request is too large")
        try:
            body = await request.json()
            messages = body["messages"]
            call = expert(messages)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            return _refuse(400, f"not a chat completion request: {error!r}")
        return JSONResponse(completion(messages, call))

    async def models(request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": MODEL, "object": "model"}]})

    async def health(request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    routes = [
        Route("/v1/chat/completions", complete, methods=["POST"]),
        Route("/v1/models", models),
        Route("/health", health),
    ]
    return Starlette(routes=routes)


def completion(messages: Sequence[dict[str, Any]], call: ToolCall | None) -> dict[str, Any]:
    """A chat completion that makes ``call``, or says that there is nothing to do."""
    message: dict[str, Any] = {"role": "assistant", "content": None if call else "I do not know this task."}
    if call is not None:
        function = {"name": call.name, "arguments": json.dumps(call.arguments)}
        message["tool_calls"] = [{"id": "call_0", "type": "function", "function": function}]
    spent_in = len(json.dumps(messages)) // _CHARS_PER_TOKEN
    spent_out = len(json.dumps(message)) // _CHARS_PER_TOKEN
    return {
        "id": f"chatcmpl-{time.time_ns()}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": MODEL,
        "choices": [
            {
                "index": 0,
                "message": message,
                "finish_reason": "tool_calls" if call else "stop",
                "logprobs": None,
            }
        ],
        "usage": {
            "prompt_tokens": spent_in,
            "completion_tokens": spent_out,
            "total_tokens": spent_in + spent_out,
        },
    }


def serve(expert: Expert, *, host: str = "127.0.0.1", port: int = 0, ready_file: Path | None = None) -> None:
    """Serve until SIGTERM or SIGINT. ``port`` 0 takes a free one; ``ready_file`` then gets the URL."""
    sock = socket.create_server((host, port))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # asyncio sets it for its own sockets only
    url = f"http://{host}:{sock.getsockname()[1]}"
    if ready_file is not None:
        ready_file.unlink(missing_ok=True)
    config = uvicorn.Config(
        create_app(expert),
        log_level="warning",
        log_config=None,
        access_log=False,
        timeout_graceful_shutdown=2,
    )
    try:
        _Server(config, url, ready_file).run(sockets=[sock])
    finally:
        sock.close()
        if ready_file is not None:
            ready_file.unlink(missing_ok=True)


class _Server(uvicorn.Server):
    """Announces its URL when it is ready, and returns on a signal instead of raising it again."""

    def __init__(self, config: uvicorn.Config, url: str, ready_file: Path | None):
        super().__init__(config)
        self._url = url
        self._ready_file = ready_file

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self._ready_file is not None:
            part = self._ready_file.with_name(f"{self._ready_file.name}.{os.getpid()}.part")
            part.write_text(self._url + "\n")
            part.replace(self._ready_file)


def _refuse(status: int, message: str) -> Response:
    return JSONResponse({"error": {"message": message, "type": "invalid_request_error"}}, status)


def main(argv: Sequence[str] | None = None) -> None:
    """Serve the expert of the bugfix task set."""
    from hintloop.envs.tasksets.bugfix.expert import next_call
    from hintloop.envs.tasksets.bugfix.taskset import load

    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--ready-file", type=Path)
    options = parser.parse_args(argv)
    load()  # takes a second; not at the first question
    serve(next_call, host=options.host, port=options.port, ready_file=options.ready_file)


if __name__ == "__main__":
    main()
