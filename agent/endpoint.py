"""Where agent programs ask the model and reach their sandboxes: one loopback HTTP server for all episodes.

The programs speak whatever dialect they speak (OpenAI chat, Responses, Anthropic, Google; streamed or not): OpenEnv's
capture layer translates. What it captures from an inference server's chat API is taken at the source here: the
messages are rendered by this side, so that a conversation grows token for token, and each token has its policy
version. ``return_token_ids`` in a request gives ids and log-probabilities in the answer, so OpenEnv's capture server
can stand in between and records the same.

Each episode has a random key, which the program sends as its API key; everything else is refused. Keys are never
logged.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import secrets
import socket
from collections.abc import AsyncIterator, Iterator
from typing import Any

import uvicorn
from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from hintloop.agent.visit import BadRequest, Closed, Visit
from hintloop.envs.models import ToolCall

MAX_BODY_BYTES = 16 * 1024 * 1024
MAX_OUTPUT_CHARS = 200_000
"""Of a call's output, as much goes back to the program; the tools have their own, smaller limits."""
_STOP_S = 10.0


class Desk:
    """The server. Episodes are admitted while it is ``open``."""

    def __init__(self, model: str):
        """``model``: the name that programs may call the model by; any other does as well."""
        self.url = ""
        self._model = model
        self._visits: dict[str, Visit] = {}

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Serve on a free loopback port. Raises ``OSError``."""
        app = await asyncio.to_thread(_App, self._model, self._visits)  # imports OpenEnv's capture layer
        sock = socket.create_server(("127.0.0.1", 0))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # asyncio sets it for its own sockets only
        self.url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        config = uvicorn.Config(
            app.routes(), log_config=None, log_level="warning", access_log=False, timeout_graceful_shutdown=1
        )
        server = _Server(config)
        serving = asyncio.create_task(server.serve(sockets=[sock]))
        try:
            yield
        finally:
            server.should_exit = True
            await asyncio.wait({serving}, timeout=_STOP_S)
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
            sock.close()

    @contextlib.contextmanager
    def admit(self, visit: Visit) -> Iterator[str]:
        """A key for the program of this episode; without it, there is nothing for it any more."""
        key = secrets.token_urlsafe(32)
        self._visits[key] = visit
        try:
            yield key
        finally:
            del self._visits[key]


class _Server(uvicorn.Server):
    """Signals are for the process that it runs in."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _App:
    def __init__(self, model: str, visits: dict[str, Visit]):
        from openenv.core.harness.capture import server, sse
        from openenv.core.harness.capture.detection import detect
        from openenv.core.harness.capture.dialects import TransformManager
        from openenv.core.harness.capture.sessions import extract_api_key
        from openenv.core.harness.capture.upstream import UpstreamRequestError

        self._capture, self._sse, self._detect, self._key = server, sse, detect, extract_api_key
        self._transforms: Any = TransformManager()  # type: ignore[no-untyped-call]
        self._untranslatable = UpstreamRequestError
        self._model = model
        self._visits = visits

    def routes(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/sandbox/task", self._task),
                Route("/sandbox/call", self._call, methods=["POST"]),
                Route("/v1/models", self._models),
                Route("/{path:path}", self._converse, methods=["POST"]),
            ]
        )

    def _visit(self, request: Request) -> Visit:
        """The episode that a request belongs to. Raises ``_Refused``."""
        key = self._key(dict(request.headers)) or request.query_params.get("key") or ""
        visit = self._visits.get(key)
        if visit is None:
            raise _Refused(401, "unknown API key")
        return visit

    async def _task(self, request: Request) -> Response:
        try:
            return JSONResponse(self._visit(request).task.model_dump(mode="json"))
        except _Refused as refused:
            return refused.response()

    async def _models(self, request: Request) -> Response:
        try:
            self._visit(request)
        except _Refused as refused:
            return refused.response()
        return JSONResponse({"object": "list", "data": [{"id": self._model, "object": "model"}]})

    async def _call(self, request: Request) -> Response:
        try:
            visit = self._visit(request)
            body = await _json(request)
            fields = {name: body[name] for name in ("name", "arguments", "malformed") if name in body}
            result = await visit.call(ToolCall(**fields))
        except _Refused as refused:
            return refused.response()
        except ValidationError:
            return _refusal(400, "a call has a name and arguments")
        except Closed:
            return _refusal(410, "the episode is over")
        return JSONResponse(
            {
                "output": result.output[:MAX_OUTPUT_CHARS],
                "exit_code": result.exit_code,
                "error": None if result.error is None else result.error.kind,
                "done": result.done,
            }
        )

    async def _converse(self, request: Request) -> Response:
        """One question to the model, in any dialect."""
        try:
            visit = self._visit(request)
            body = await _json(request)
        except _Refused as refused:
            return refused.response()
        path, headers = request.url.path, dict(request.headers)
        counted = self._capture.aux_dialect(path)
        if counted is not None:  # a program asks how long its prompt is
            count = self._capture.approximate_token_count(body)
            return JSONResponse(self._capture.aux_token_count_response(counted, count))
        dialect = self._detect(path, headers, body)
        target = f"{path}?{request.url.query}"
        streamed = self._capture.wants_stream(target, body)
        answer = self._answer(visit, dialect, body, streamed=streamed)
        if streamed:
            response: Response = await self._sse.keepalive_response(answer, dialect)
            return response
        return await answer

    async def _answer(self, visit: Visit, dialect: Any, body: dict[str, Any], *, streamed: bool) -> Response:
        transform, asked = self._transforms.get(dialect), copy.deepcopy(body)
        try:
            chat = transform.transform_request(body)
            self._capture.normalise_for_capture(chat)
            made = await visit.ask(chat)
        except (BadRequest, self._untranslatable) as error:
            return _refusal(400, str(error))
        except Closed:
            return _refusal(410, "the episode is over")
        self._capture.normalise_response(made)
        if streamed:
            events = self._sse.replay(dialect, transform, made, asked)
            return StreamingResponse(events, media_type="text/event-stream", headers=self._sse.SSE_HEADERS)
        told = transform.transform_response(made, asked)
        self._capture.normalise_client_payload(told, dialect)
        return JSONResponse(told)


class _Refused(Exception):
    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status

    def response(self) -> Response:
        return _refusal(self.status, str(self))


def _refusal(status: int, message: str) -> Response:
    return JSONResponse({"error": {"message": message, "type": "invalid_request_error"}}, status)


async def _json(request: Request) -> dict[str, Any]:
    """The body, a JSON object of bounded size. Raises ``_Refused``."""
    data = bytearray()
    async for part in request.stream():
        data += part
        if len(data) > MAX_BODY_BYTES:
            raise _Refused(413, "the request is too large")
    try:
        body = json.loads(data)
    except (ValueError, RecursionError):
        body = None
    if not isinstance(body, dict):
        raise _Refused(400, "a request is a JSON object")
    return body
