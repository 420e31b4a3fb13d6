"""One vLLM server over HTTP: sampling with an exact record, and the control calls of a weight roll-out.

A server belongs to one rollout process. ``hintloop.rollout.vllm_server`` starts one with what this needs.
"""

from __future__ import annotations

import asyncio
import math
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import httpx

from hintloop.agent.engine import NEUTRAL, EngineError, Sampling
from hintloop.rollout.engines.answer import (
    MAX_ERROR_CHARS,
    BadAnswer,
    Piece,
    Standing,
    Stream,
    events,
)
from hintloop.rollout.vllm_server import LOGPROBS_MODE

GENERATE = "/inference/v1/generate"
_STREAM_HEADERS = {"Accept-Encoding": "identity"}


@dataclass(frozen=True, slots=True)
class Patience:
    """How long servers are waited for, in seconds."""

    turn: float = 300.0
    """One turn with all its retries, and the wait for a server that is free to take it."""
    first: float = 150.0
    """The first piece of an answer, the wait in the server's queue included; longer while the server brings other
    answers meanwhile."""
    stall: float = 60.0
    """Between two pieces, a pause for new weights included."""
    connect: float = 5.0
    control: float = 30.0
    """A short call: pause, resume, the name of the weights."""
    load: float = 600.0
    """Taking fetched weights over."""
    fetch: float = 3600.0
    lag: float = 30.0
    """How much later than the first server another one may have a version before it leaves the pool, the wait for its
    turn to change not counted; and how long the others wait for one that changes."""
    join: float = 600.0
    """Until any server has a version."""
    poll: float = 1.0
    """Between two looks at a server."""


class ServerError(EngineError):
    """A server did not do what it was asked to."""


class _Slow(Exception):
    """A request is given up that a busy server was late with."""


class VllmServer:
    """Talks to one server. The HTTP client is shared and belongs to the caller; it is not to have timeouts."""

    def __init__(
        self,
        url: str,
        client: httpx.AsyncClient,
        *,
        stop_ids: Sequence[int],
        patience: Patience,
        by_name: bool = False,
        room: int = 0,
    ) -> None:
        """``stop_ids`` end an answer. ``by_name``: versions are adapters, and each request names the newest.

        A server that takes fewer than ``room`` tokens, prompt and answer together, is refused by ``connect``.
        """
        self.url = url.rstrip("/")
        self.standing = Standing()
        self.config: dict[str, Any] = {}
        """vLLM's configuration; known after ``connect``."""
        self.in_use: Counter[str] = Counter()
        """Requests that are not answered yet, by the adapter that they named."""
        self.max_length = 0
        """Tokens of prompt and answer together; known after ``connect``."""
        self.late = 0
        """Requests that wait for their first piece for longer than is patient, while it brings others theirs."""
        self._heard_at = -math.inf
        """When it last brought a piece of any answer; time of the loop."""
        self._newest = -math.inf
        """When the newest of the requests was sent of which it has brought a piece."""
        self._client = client
        self._generate = httpx.URL(self.url + GENERATE)
        self._stop_ids = list(stop_ids)
        self._patience = patience
        self._by_name = by_name
        self._room = room

    # Sampling

    async def sample(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, leave: Callable[[], bool] = lambda: False
    ) -> Piece:
        """Send one request. ``ValueError`` when it cannot be sampled at all; other failures are in the piece.

        A request that is late keeps its place in the queue of a server that is only busy, until ``leave`` says that
        there is a better one.
        """
        body = self._body(prompt_ids, sampling)
        limit, adapter = body["sampling_params"]["max_tokens"], self.standing.name if self._by_name else ""
        stream = Stream(self.standing, limit, frozenset(self._stop_ids), adapter=adapter)
        if adapter:
            body["model"] = adapter
            self.in_use[adapter] += 1
        problem, gone, slow = "", False, False
        try:
            await self._read(body, stream, leave)
        except _Slow:
            problem, slow = "it is busy, and was late", True
        except TimeoutError:
            problem, gone = "nothing came for too long", True
        except httpx.HTTPError as error:
            problem, gone = f"{type(error).__name__}: {error}", True
        except BadAnswer as error:
            problem, gone = str(error), True
        except ServerError as error:
            problem = str(error)
        finally:
            self.in_use -= Counter([adapter])
        piece = await stream.piece(problem or "the answer had no end", gone=gone)
        if piece.finish_reason:
            return piece
        return replace(piece, problem=f"{self.url}: {piece.problem}", slow=slow)

    def _body(self, prompt_ids: Sequence[int], sampling: Sampling) -> dict[str, Any]:
        """A request whose log-probabilities are those of the tempered model, nothing cut off."""
        limit = min(sampling.max_new_tokens, self.max_length - len(prompt_ids))
        if not prompt_ids or limit < 1:
            raise ValueError(f"a prompt of {len(prompt_ids)} tokens leaves no room in {self.max_length}")
        if not 0.0 <= sampling.temperature < math.inf:
            raise ValueError(f"cannot sample with {sampling}")
        return {
            "request_id": uuid.uuid4().hex,
            "token_ids": list(prompt_ids),
            "stream": True,
            "sampling_params": {
                "temperature": sampling.temperature,
                "max_tokens": limit,
                "stop_token_ids": self._stop_ids,
                "ignore_eos": True,
                "logprobs": 0,
                "detokenize": False,
                **NEUTRAL,
            },
        }

    async def _read(self, body: dict[str, Any], stream: Stream, leave: Callable[[], bool]) -> None:
        stall, loop = self._patience.stall, asyncio.get_running_loop()
        began, waits = loop.time(), True
        clock = asyncio.timeout(None)  # until the first piece it is the watch that sets it
        watch = asyncio.create_task(self._watch(began, clock, leave))
        try:
            async with (
                clock,
                self._client.stream("POST", self._generate, json=body, headers=_STREAM_HEADERS) as response,
            ):
                if response.status_code != 200:
                    await response.aread()
                    if response.status_code == 404 and "model" in body:
                        raise BadAnswer(f"it has no adapter {body['model']}; was it started again?")
                    raise _refusal(response)
                async for event in events(response):
                    waits = False
                    watch.cancel()
                    self._heard_at, self._newest = loop.time(), max(self._newest, began)
                    clock.reschedule(self._heard_at + stall)
                    stream.add(event)
        except TimeoutError:
            if waits and watch.done() and watch.result():
                raise _Slow from None
            raise
        finally:
            watch.cancel()

    async def _watch(self, began: float, clock: asyncio.Timeout, leave: Callable[[], bool]) -> bool:
        """End a request whose first piece is late, at once if the server is silent; whether it was only busy."""
        loop, first = asyncio.get_running_loop(), self._patience.first
        await asyncio.sleep(first)
        self.late += 1
        try:
            busy = self._heard_at + first > loop.time() and await self._is_well()
            # one that came when this was late already, and is answered: this one is in no queue any more
            while busy and not (leave() or self._newest > began + first):
                await asyncio.sleep(self._patience.poll)
                busy = self._heard_at + first > loop.time()
        finally:
            self.late -= 1
        clock.reschedule(loop.time())
        return busy

    # Control; everything raises ``ServerError``

    async def connect(self) -> None:
        """Learn what the server can do."""
        cards = await self._control("GET", "/v1/models")
        info = await self._control("GET", "/server_info", params={"config_format": "json"})
        try:
            self.max_length = int(cards["data"][0]["max_model_len"])
            self.config = dict(info["vllm_config"])
            mode = self.config["model_config"]["logprobs_mode"]
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise ServerError(f"{self.url}: not a vLLM server that can be used: {error!r}") from error
        if mode != LOGPROBS_MODE:
            raise ServerError(
                f"{self.url}: it reports {mode}, which are not of the tokens' distribution; start it with "
                f"--logprobs-mode {LOGPROBS_MODE}"
            )
        if self.max_length < self._room:
            raise ServerError(
                f"{self.url}: it takes {self.max_length} tokens, and episodes may have {self._room} "
                f"(rollout.max_tokens); start it with --max-model-len {self._room}"
            )

    async def weights_name(self) -> str:
        """What the weights in place are called; those that the server was started with, ``default``."""
        return str((await self._control("GET", "/weight_info")).get("weight_version"))

    async def name_weights(self, name: str) -> None:
        """Name the weights in place; exact while generation is paused."""
        await self._control("POST", "/update_weight_version", json={"new_version": name})

    async def pause(self) -> None:
        """Freeze what is running, and forget what older weights cached."""
        await self._control("POST", "/pause", params={"mode": "keep", "clear_cache": "true"})

    async def resume(self) -> None:
        """Let generation go on."""
        await self._control("POST", "/resume")

    async def _is_well(self) -> bool:
        try:
            await self._control("GET", "/health")
        except ServerError:
            return False
        return True

    async def is_paused(self) -> bool:
        """Whether generation is frozen."""
        return bool((await self._control("GET", "/is_paused")).get("is_paused"))

    async def abort_all(self) -> None:
        """End all requests; each is answered with what it has."""
        await self._control("POST", "/abort_requests", json={"request_ids": []})

    async def call(self, method: str, *, seconds: float | None = None, **kwargs: Any) -> list[dict[str, Any]]:
        """A method of the worker extension; the answer of each worker."""
        seconds = seconds or self._patience.control
        body = {"method": method, "kwargs": kwargs, "timeout": seconds}
        results = (await self._control("POST", "/collective_rpc", json=body, seconds=seconds)).get("results")
        if not isinstance(results, list) or not all(isinstance(result, dict) for result in results):
            raise ServerError(f"{self.url}: {method} answered {str(results)[:MAX_ERROR_CHARS]}")
        return results

    async def adapters(self) -> list[str]:
        """The adapters that requests may name."""
        cards = (await self._control("GET", "/v1/models")).get("data") or []
        return [str(card["id"]) for card in cards if card.get("parent")]

    async def load_adapter(self, name: str, path: str) -> None:
        """Load an adapter from a folder of the server's machine, under a name that is new there."""
        body = {"lora_name": name, "lora_path": path}
        await self._control("POST", "/v1/load_lora_adapter", json=body, seconds=self._patience.load)

    async def unload_adapter(self, name: str) -> None:
        """Let no request name an adapter any more; those that do go on."""
        await self._control("POST", "/v1/unload_lora_adapter", json={"lora_name": name})

    async def world_size(self) -> int:
        """How many workers it has."""
        return int((await self._control("GET", "/get_world_size")).get("world_size") or 1)

    async def transfer(self, step: str, body: dict[str, Any] | None = None) -> None:
        """One step of vLLM's weight transfer: the route of that name."""
        await self._control("POST", f"/{step}", json=body, seconds=self._patience.load)

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """Log-probability of each token after the first, at temperature 1, nats."""
        params = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0}
        answer = await self._whole(token_ids, params)
        try:
            found = answer["prompt_logprobs"][1:]
            return [
                float(entry[str(token)]["logprob"]) for entry, token in zip(found, token_ids[1:], strict=True)
            ]
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise ServerError(f"{self.url}: no log-probabilities of a prompt: {error!r}") from error

    async def score_adapter(self, token_ids: Sequence[int], *, name: str) -> list[float]:
        """The same by an adapter, as what it would sample after each beginning of the tokens.

        vLLM's own scores of a prompt are not for adapters: on a CPU they end the engine while it also samples.
        """
        places = range(1, len(token_ids))
        return list(await asyncio.gather(*(self._score_next(token_ids[: at + 1], name) for at in places)))

    async def _score_next(self, token_ids: Sequence[int], name: str) -> float:
        *before, token = token_ids
        wanted = [token, token]  # of two it shows two: what it sampled, and this
        params = {"max_tokens": 1, "temperature": 1.0, "logprobs": 2, "logprob_token_ids": wanted}
        answer = await self._whole(before, params, model=name)
        try:
            (content,) = answer["choices"][0]["logprobs"]["content"]
            return next(float(top["logprob"]) for top in content["top_logprobs"] if top["token_id"] == token)
        except (KeyError, IndexError, TypeError, ValueError, StopIteration) as error:
            raise ServerError(f"{self.url}: no log-probability of a token: {error!r}") from error

    async def _whole(self, token_ids: Sequence[int], params: dict[str, Any], **more: str) -> dict[str, Any]:
        """An answer that is not streamed. The first one that a server gives may take long."""
        params = {**params, "detokenize": False, **NEUTRAL}
        body = {"request_id": uuid.uuid4().hex, "token_ids": list(token_ids), "sampling_params": params}
        return await self._control("POST", GENERATE, json=body | more, seconds=self._patience.load)

    async def _control(
        self, method: str, path: str, *, seconds: float | None = None, **options: Any
    ) -> dict[str, Any]:
        seconds = seconds or self._patience.control
        try:
            async with asyncio.timeout(seconds):
                response = await self._client.request(method, self.url + path, **options)
            if response.status_code != 200:
                raise _refusal(response)
            is_json = response.headers.get("content-type", "").startswith("application/json")
            found = response.json() if is_json else {}
        except TimeoutError:
            raise ServerError(f"{self.url}: {path} was not answered within {seconds:g} s") from None
        except httpx.HTTPError as error:
            raise ServerError(f"{self.url}: {path}: {type(error).__name__}: {error}") from error
        except (ValueError, ServerError) as error:
            raise ServerError(f"{self.url}: {path}: {error}") from error
        return found if isinstance(found, dict) else {}


def _refusal(response: httpx.Response) -> Exception:
    """``ValueError`` when the request itself is at fault, else ``ServerError``."""
    said = f"HTTP {response.status_code}: {response.text[:MAX_ERROR_CHARS]}"
    if response.status_code in (400, 422):
        return ValueError(said)
    if response.status_code in (403, 404):
        said += " (it needs VLLM_SERVER_DEV_MODE=1 and --enable-scale-out)"
    return ServerError(said)
