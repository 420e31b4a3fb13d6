"""The client of the coding environment: one session with one server.

OpenEnv's own client opens a new socket after a lost one without a word, and the new session has no episode.
This one never does: a lost session stays lost, with ``EnvironmentLost`` at every use, and has to be replaced.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

from websockets.exceptions import ConnectionClosed
from websockets.protocol import State as SocketState

from hintloop.envs._openenv import EnvClient, StepResult
from hintloop.envs.errors import Cause
from hintloop.envs.models import CodingState, ToolCall, ToolResult

CONNECT_TIMEOUT_S = 10.0
MESSAGE_TIMEOUT_S = 180.0
"""Longest wait for one answer, on a busy machine; longer for a task whose grading may take longer."""
_GRACE_S = 60.0
"""For such a task: what a busy server may take beyond the time that it names."""
WAIT_S = 600.0
"""Longest wait for a free session."""
_MAX_MESSAGE_MB = 16.0


class EnvironmentLost(ConnectionError):
    """The session is gone, and its episode with it: an infrastructure failure, never the agent's score."""


class AtCapacity(EnvironmentLost):
    """The server has no free session now."""


class Refused(ValueError):
    """The server refused one message, such as a reset to an unknown task; the session is still good."""


class CodingEnvClient(EnvClient[ToolCall, ToolResult, CodingState]):
    """One session with one server; await ``reset``, ``step`` and ``state``, one at a time.

    Each raises ``EnvironmentLost`` or ``Refused``. After a timeout, a cancelled call or a closed socket the
    session is lost for good.
    """

    def __init__(
        self,
        base_url: str,
        *,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        message_timeout_s: float = MESSAGE_TIMEOUT_S,
    ):
        super().__init__(
            base_url=base_url,
            connect_timeout_s=connect_timeout_s,
            message_timeout_s=message_timeout_s,
            max_message_size_mb=_MAX_MESSAGE_MB,
            websocket_ping_interval_s=None,  # the wait for an answer has a deadline, and waits are rare
            mode="simulation",
        )
        self._answer_s = message_timeout_s
        self._used = False
        self._busy = False
        self._clean = True
        self._failed = False

    @property
    def alive(self) -> bool:
        """Whether the socket is open, as far as anybody knows."""
        return self._ws is not None and self._ws.state is SocketState.OPEN

    @property
    def reusable(self) -> bool:
        """Alive, and between two episodes, of which the last did not end with an infrastructure failure."""
        return self.alive and self._clean

    @property
    def failed(self) -> bool:
        """Whether the server or its sandbox failed the session; otherwise it is as good as its users left it."""
        return self._failed

    def abandon(self) -> None:
        """Drop the socket at once; the server then ends the session."""
        ws, self._ws = self._ws, None
        if ws is not None:
            ws.transport.abort()

    async def _connect_async(self) -> CodingEnvClient:
        if not self._used:
            self._used = True
            try:
                await super()._connect_async()
            except ConnectionError as error:
                raise EnvironmentLost(str(error)) from error
        if self._ws is None:
            raise EnvironmentLost(f"the session with {self.base_url} is gone")
        return self

    async def _send_and_receive(self, message: dict[str, Any]) -> dict[str, Any]:
        if self._busy:
            raise RuntimeError("one call at a time: the one before has no answer yet")
        self._busy = True
        try:
            await self._connect_async()
            answer = await self._exchange(_encode(message))
        except EnvironmentLost:
            raise
        except (OSError, ConnectionClosed) as error:
            self._failed = True
            self.abandon()
            raise EnvironmentLost(f"{self.base_url}: {str(error) or 'no answer in time'}") from error
        except BaseException:
            self.abandon()
            raise
        finally:
            self._busy = False
        if answer["type"] == "error":
            self._raise_error(answer["data"])
        return answer

    async def _exchange(self, text: bytes) -> dict[str, Any]:
        ws = self._ws
        assert ws is not None
        async with asyncio.timeout(self._answer_s):
            # A refused session is told so and closed; its last message can still be read.
            with contextlib.suppress(ConnectionClosed):
                await ws.send(text, text=True)
            answer = json.loads(await ws.recv())
        if not isinstance(answer, dict) or "type" not in answer or "data" not in answer:
            raise ConnectionError("the answer is not an OpenEnv message")
        return answer

    def _raise_error(self, data: dict[str, Any]) -> None:
        code, message = data.get("code"), str(data.get("message"))
        if code in ("EXECUTION_ERROR", "VALIDATION_ERROR"):
            raise Refused(message)
        self._failed = True
        self.abandon()
        raise AtCapacity(message) if code == "CAPACITY_REACHED" else EnvironmentLost(f"{code}: {message}")

    def _step_payload(self, action: ToolCall) -> dict[str, Any]:
        payload = {"name": action.name, "arguments": action.arguments, "malformed": action.malformed}
        if action.keep != "no":
            payload["keep"] = action.keep
        if action.trial is not None:
            payload["trial"] = action.trial.model_dump(mode="json")
        return payload

    def _parse_result(self, payload: dict[str, Any]) -> StepResult[ToolResult]:
        done, reward = payload["done"], payload["reward"]
        result = ToolResult.model_validate({**payload["observation"], "done": done, "reward": reward})
        if result.task is not None:
            longer = result.task.max_step_seconds + _GRACE_S - MESSAGE_TIMEOUT_S
            self._answer_s = self._message_timeout + max(0.0, longer)
        self._failed = result.error is not None and result.error.cause is Cause.INFRA
        self._clean = done and not self._failed
        return step_result(result)

    def _parse_state(self, payload: dict[str, Any]) -> CodingState:
        return CodingState.model_validate(payload)


def step_result(result: ToolResult) -> StepResult[ToolResult]:
    """``result`` as every client of OpenEnv gives it, with reward and end beside the observation."""
    reward = None if result.reward is None else float(result.reward)
    return StepResult(observation=result, reward=reward, done=result.done)


def _encode(message: dict[str, Any]) -> bytes:
    """JSON text. What is not Unicode (half of a surrogate pair, by an agent's JSON escape) becomes ``?``."""
    return json.dumps(message, ensure_ascii=False).encode("utf-8", errors="replace")


async def open_session(url: str, *, message_timeout_s: float = MESSAGE_TIMEOUT_S) -> CodingEnvClient:
    """One attempt to get a session. ``AtCapacity`` or another ``EnvironmentLost``.

    A server at capacity says so at the first message, not at the connection, so one is exchanged.
    """
    client = CodingEnvClient(url, message_timeout_s=message_timeout_s)
    try:
        await client.state()
    except BaseException:
        client.abandon()
        raise
    return client
