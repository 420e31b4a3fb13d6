"""The HTTP surface of the simulated server: what the rollout side uses of vLLM, with its names and shapes.

They are those of vLLM 0.32 with ``VLLM_SERVER_DEV_MODE=1`` and ``--enable-scale-out``. ``/sim`` is our own: GET
shows what the server did, POST plans more faults. As with vLLM's own routes of this kind nobody is asked who he
is: keep it on loopback.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from functools import partial
from typing import Any

from pydantic import TypeAdapter
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from hintloop.agent.engine import NEUTRAL
from hintloop.rollout.engines.sim import WRONG_LABEL, Answer, Ask, Dropped, SimEngine
from hintloop.rollout.engines.sim_model import SimModel
from hintloop.rollout.engines.sim_plan import Fault, Plan
from hintloop.rollout.engines.sim_worker import BACKEND, Refused
from hintloop.rollout.vllm_server import ADAPTER_SLOTS, LOGPROBS_MODE

MODEL = "sim"
MAX_BODY_BYTES = 16 * 1024 * 1024
_FAULTS = TypeAdapter(tuple[Fault, ...])

Handler = Callable[[SimEngine, Request], Awaitable[Response]]


def create_app(engine: SimEngine) -> Starlette:
    """All routes on one engine."""

    def route(path: str, handler: Handler, method: str = "POST") -> Route:
        async def endpoint(request: Request) -> Response:
            if not engine.up:
                return _error(503, "the server is starting")
            if int(request.headers.get("content-length") or 0) > MAX_BODY_BYTES:
                return _error(413, "the request is too large")
            try:
                if handler is generate:
                    return await generate(engine, request)
                return await _control(engine, handler, request)
            except Dropped:
                return Cut()
            except Refused as error:
                return _error(error.status, str(error))
            except (ValueError, KeyError, TypeError) as error:
                return _error(400, f"{type(error).__name__}: {error}")

        return Route(path, endpoint, methods=[method])

    return Starlette(
        routes=[
            route("/inference/v1/generate", generate),
            route("/inference/v1/abort_requests", abort_requests),
            route("/abort_requests", abort_requests),
            route("/pause", pause),
            route("/resume", resume),
            route("/is_paused", is_paused, "GET"),
            route("/update_weight_version", update_weight_version),
            route("/weight_info", weight_info, "GET"),
            route("/collective_rpc", collective_rpc),
            route("/v1/load_lora_adapter", load_lora_adapter),
            route("/v1/unload_lora_adapter", unload_lora_adapter),
            route("/get_world_size", world_size, "GET"),
            *(route(f"/{step}", partial(transfer, step)) for step in TRANSFER),
            route("/health", health, "GET"),
            route("/metrics", metrics, "GET"),
            route("/v1/models", models, "GET"),
            route("/server_info", server_info, "GET"),
            route("/sim", show, "GET"),
            route("/sim/faults", plan_faults),
        ]
    )


async def _control(engine: SimEngine, handler: Handler, request: Request) -> Response:
    """Any call but ``generate``, with what is planned for it."""
    place = request.url.path.rpartition("/")[2]
    if handler is collective_rpc:
        place = str((await request.json())["method"])
    fault = engine.faults.strike(place)
    if fault is None:
        return await handler(engine, request)
    if fault.kind == "error":
        return _error(fault.status, "planned")
    if fault.kind == "hang":
        await _gone(request.receive)
        raise Dropped
    if fault.kind == "restart":
        await engine.fail(fault)
    life = engine.restarts
    await asyncio.sleep(fault.seconds if fault.kind == "slow" else 0)
    if life != engine.restarts:
        raise Dropped
    response = await handler(engine, request)
    if fault.kind == "drop":
        raise Dropped
    return _mislabel(engine, place, response) if fault.kind == "mislabel" else response


def _mislabel(engine: SimEngine, place: str, response: Response) -> Response:
    """The answer to a call that tells a version, or names the weights, with another one."""
    if response.status_code != 200:
        return response
    said = json.loads(bytes(response.body))
    if place == "weight_info":
        said["weight_version"] = WRONG_LABEL
    elif place == "models":
        for card in said["data"]:
            card["id"] = WRONG_LABEL if card["parent"] else card["id"]
    elif place.startswith("hintloop_"):
        for result in said["results"]:
            result["version"] = int(WRONG_LABEL)
    else:
        engine.label = WRONG_LABEL
    return JSONResponse(said)


class Cut(Response):
    """The connection ends in the middle of an answer."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Begin, and break off."""
        headers = [(b"content-length", b"1")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        raise Dropped


async def generate(engine: SimEngine, request: Request) -> Response:
    """``POST /inference/v1/generate``: token ids in, token ids out, streamed or whole."""
    body = await request.json()
    model = _named(engine, body)
    ask = _ask(body, engine.plan, model)
    fault = engine.faults.strike("generate")
    if fault and fault.kind == "error":
        return _error(fault.status, "planned")
    if not engine.healthy:
        return _error(500, "EngineCore encountered an issue.")
    if body.get("stream"):
        return EventStream(_events(engine, ask, fault))
    answer = Answer()
    async for grown in engine.generate(ask, fault):
        answer = grown
    choice = _choice(answer, 0)
    if wanted := body["sampling_params"].get(
        "logprob_token_ids"
    ):  # for the first token; more is not simulated
        choice["logprobs"]["content"][0]["top_logprobs"] = [
            _score_next(engine, ask, token) for token in wanted
        ]
    whole = {
        "request_id": f"generate-tokens-{ask.request_id}",
        "model": MODEL,
        "created": int(time.time()),
        "usage": {
            "prompt_tokens": len(ask.token_ids),
            "completion_tokens": len(answer.token_ids),
            "total_tokens": len(ask.token_ids) + len(answer.token_ids),
        },
        "prompt_logprobs": _prompt_logprobs(engine, body, ask),
        "output_mode": "tokens",
        "choices": [choice],
    }
    return JSONResponse(whole)


class EventStream(Response):
    """Server-sent events; their source ends when the client goes. Starlette's own takes twice the time."""

    def __init__(self, events: AsyncGenerator[str, None]) -> None:
        super().__init__(media_type="text/event-stream")
        del self.headers["content-length"]
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all of it."""
        sending = asyncio.create_task(self._send(send))
        watching = asyncio.create_task(_gone(receive))
        try:
            await asyncio.wait({sending, watching}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        finally:
            sending.cancel()
            watching.cancel()
            await asyncio.gather(sending, watching, return_exceptions=True)

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async with contextlib.aclosing(self._events) as events:
            async for event in events:
                await send({"type": "http.response.body", "body": event.encode(), "more_body": True})
        await send({"type": "http.response.body", "body": b""})


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _events(engine: SimEngine, ask: Ask, fault: Fault | None) -> AsyncGenerator[str, None]:
    sent = 0
    async with contextlib.aclosing(engine.generate(ask, fault)) as answers:
        async for answer in answers:
            chunk = {
                "request_id": f"generate-tokens-{ask.request_id}",
                "usage": None,
                "output_mode": "tokens",
                "choices": [_choice(answer, sent)],
            }
            sent = len(answer.token_ids)
            yield f"data: {json.dumps(chunk)}\n\n"
    yield "data: [DONE]\n\n"


def _choice(answer: Answer, start: int) -> dict[str, Any]:
    """What came after the first ``start`` tokens; the spans come with the end, and cover all."""
    content = [
        {
            "token_id": token,
            "logprob": logprob,
            "rank": 1,
            "top_logprobs": [{"token_id": token, "logprob": logprob, "rank": 1}],
        }
        for token, logprob in zip(answer.token_ids[start:], answer.logprobs[start:], strict=True)
    ]
    stopped = answer.finish_reason == "stop"
    return {
        "index": 0,
        "logprobs": {"content": content},
        "finish_reason": answer.finish_reason,
        "stop_reason": answer.token_ids[-1] if stopped else None,
        "token_ids": answer.token_ids[start:],
        "weight_versions": answer.spans if answer.finish_reason else None,
    }


def _named(engine: SimEngine, body: dict[str, Any]) -> SimModel | None:
    """The adapter that a request names; None for the weights."""
    name = body.get("model") or MODEL
    if name != MODEL and name not in engine.worker.adapters:
        raise Refused(404, f"The model `{name}` does not exist.")
    return engine.worker.adapters.get(name)


def _ask(body: dict[str, Any], plan: Plan, model: SimModel | None) -> Ask:
    params = dict(body["sampling_params"])
    for name, neutral in NEUTRAL.items():
        if params.get(name, neutral) != neutral:
            raise ValueError(f"{name} must be {neutral:g}, not {params[name]}")
    token_ids = tuple(int(token) for token in body["token_ids"])
    room = plan.max_model_len - len(token_ids)
    max_tokens = int(params.get("max_tokens", room))
    if not token_ids or min(token_ids) < 0 or not 1 <= max_tokens <= room:
        raise ValueError(
            f"{len(token_ids)} prompt tokens and {max_tokens} more do not fit {plan.max_model_len}"
        )
    seed = params.get("seed")
    return Ask(
        request_id=str(body["request_id"]),
        model=model,
        token_ids=token_ids,
        max_tokens=max_tokens,
        greedy=float(params.get("temperature", 1.0)) == 0.0,
        seed=None if seed is None else int(seed),
        stop_ids=tuple(params.get("stop_token_ids") or ()),
    )


def _score_next(engine: SimEngine, ask: Ask, token: int) -> dict[str, Any]:
    score = (ask.model or engine.worker.model).score([*ask.token_ids, token])[-1]
    return {"token_id": token, "logprob": score, "rank": 1}


def _prompt_logprobs(engine: SimEngine, body: dict[str, Any], ask: Ask) -> list[dict[str, Any] | None] | None:
    if body["sampling_params"].get("prompt_logprobs") is None:
        return None
    scores = (ask.model or engine.worker.model).score(ask.token_ids)
    return [
        None,
        *(
            {str(token): {"logprob": score, "rank": 1, "decoded_token": None}}
            for token, score in zip(ask.token_ids[1:], scores, strict=True)
        ),
    ]


async def abort_requests(engine: SimEngine, request: Request) -> Response:
    """``POST /abort_requests``: end requests with what they have; no ids means all."""
    ids = [name.removeprefix("generate-tokens-") for name in (await request.json()).get("request_ids") or ()]
    return JSONResponse({"status": "aborted", "aborted": engine.abort(ids)})


async def pause(engine: SimEngine, request: Request) -> Response:
    """``POST /pause?mode=keep``, the only mode that is simulated."""
    if request.query_params.get("mode") != "keep":
        raise ValueError("only mode=keep is simulated")
    engine.pause()
    return JSONResponse({"status": "paused"})


async def resume(engine: SimEngine, request: Request) -> Response:
    """``POST /resume``."""
    engine.resume()
    return JSONResponse({"status": "resumed"})


async def is_paused(engine: SimEngine, request: Request) -> Response:
    """``GET /is_paused``."""
    return JSONResponse({"is_paused": engine.paused})


async def update_weight_version(engine: SimEngine, request: Request) -> Response:
    """``POST /update_weight_version``: name the weights in use."""
    engine.label = str((await request.json())["new_version"])
    return JSONResponse({"success": True, "new_version": engine.label})


async def weight_info(engine: SimEngine, request: Request) -> Response:
    """``GET /weight_info``: how the weights in use are named."""
    if not engine.healthy:
        return _error(500, "EngineCore encountered an issue.")
    return JSONResponse({"weight_version": engine.label})


async def collective_rpc(engine: SimEngine, request: Request) -> Response:
    """``POST /collective_rpc``: call a method of the worker extension."""
    body = await request.json()
    try:
        result = await engine.call(body["method"], body.get("kwargs") or {})
    except (AttributeError, TypeError, ValueError) as error:
        return _error(500, f"Call to collective_rpc method failed: {error}")
    return JSONResponse({"results": [result]})


async def load_lora_adapter(engine: SimEngine, request: Request) -> Response:
    """``POST /v1/load_lora_adapter``."""
    body = await request.json()
    await asyncio.sleep(engine.plan.load_ms / 1e3)
    engine.worker.load_adapter(str(body["lora_name"]), str(body["lora_path"]))
    return PlainTextResponse(f"Success: LoRA adapter '{body['lora_name']}' added successfully.")


async def unload_lora_adapter(engine: SimEngine, request: Request) -> Response:
    """``POST /v1/unload_lora_adapter``."""
    name = str((await request.json())["lora_name"])
    engine.worker.unload_adapter(name)
    return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")


async def world_size(engine: SimEngine, request: Request) -> Response:
    """``GET /get_world_size``."""
    return JSONResponse({"world_size": 1})


TRANSFER = (
    "init_weight_transfer_engine",
    "shutdown_weight_transfer_engine",
    "start_weight_update",
    "update_weights",
    "finish_weight_update",
)


async def transfer(step: str, engine: SimEngine, request: Request) -> Response:
    """A step of the weight transfer; the sender is ``hintloop.rollout.vllm_sender``."""
    body = json.loads(await request.body() or b"{}")
    worker = engine.worker
    if step == "init_weight_transfer_engine":
        await asyncio.to_thread(worker.init_transfer, body["init_info"])
    elif step == "shutdown_weight_transfer_engine":
        worker.end_transfer()
    elif step == "start_weight_update":
        worker.start_update()
    elif step == "update_weights":
        await asyncio.sleep(engine.plan.load_ms / 1e3)
        await asyncio.to_thread(worker.update, body["update_info"])
    else:
        worker.finish_update()
        engine.label = str(body.get("weight_version") or engine.label)
    return JSONResponse({"message": step})


async def health(engine: SimEngine, request: Request) -> Response:
    """``GET /health``: 200, or 503 when the engine is dead."""
    return Response(status_code=200 if engine.healthy else 503)


async def metrics(engine: SimEngine, request: Request) -> Response:
    """``GET /metrics``: the Prometheus names that vLLM has for these."""
    values = {
        "vllm:num_requests_running": len(engine.running) - engine.waiting,
        "vllm:num_requests_waiting": engine.waiting,
        "vllm:generation_tokens_total": engine.sampled,
    }
    lines = [f'{name}{{engine="0",model_name="{MODEL}"}} {float(value)}\n' for name, value in values.items()]
    return PlainTextResponse("".join(lines))


async def models(engine: SimEngine, request: Request) -> Response:
    """``GET /v1/models``."""
    card = {"id": MODEL, "object": "model", "owned_by": "vllm", "max_model_len": engine.plan.max_model_len}
    adapters = [
        {**card, "id": name, "parent": MODEL, "max_model_len": None} for name in engine.worker.adapters
    ]
    return JSONResponse({"object": "list", "data": [{**card, "parent": None}, *adapters]})


async def server_info(engine: SimEngine, request: Request) -> Response:
    """``GET /server_info?config_format=json``: the part of the configuration that matters to a client."""
    config = {
        "model_config": {"logprobs_mode": LOGPROBS_MODE, "max_model_len": engine.plan.max_model_len},
        "lora_config": {"max_loras": ADAPTER_SLOTS},
        "weight_transfer_config": {"backend": BACKEND},
    }
    return JSONResponse({"vllm_config": config, "vllm_env": {}, "system_env": {}})


async def show(engine: SimEngine, request: Request) -> Response:
    """``GET /sim``: what the server did, and what it has still planned."""
    return JSONResponse(
        {
            "label": engine.label,
            "adapters": list(engine.worker.adapters),
            "paused": engine.paused,
            "restarts": engine.restarts,
            "sampled": engine.sampled,
            "running": len(engine.running),
            "served": list(engine.served),
            "faults": engine.faults.left(),
        }
    )


async def plan_faults(engine: SimEngine, request: Request) -> Response:
    """``POST /sim/faults``: a JSON list of faults to come."""
    engine.faults.add(_FAULTS.validate_python(await request.json()))
    return JSONResponse({"faults": engine.faults.left()})


def _error(status: int, message: str) -> Response:
    kind = "BadRequestError" if status < 500 else "InternalServerError"
    return JSONResponse({"error": {"message": message, "type": kind, "param": None, "code": status}}, status)
