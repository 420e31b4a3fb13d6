"""Whether an agreed action is worth having: it is executed where the agent stood, in a copy of the sandbox."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from hintloop.agent.episode import Environment
from hintloop.agent.transcript import TurnEvent
from hintloop.envs.client import Refused
from hintloop.envs.errors import Cause
from hintloop.envs.models import ToolCall, ToolResult, Trial

NOT_COMPARABLE = "no visible tests"
NOT_BETTER = "not better"
NOT_KEPT = "state not kept"
FAILED = "trial failed"


async def objection(
    env: Environment,
    event: TurnEvent,
    chosen: Sequence[ToolCall],
    demand: Literal["no_error", "better_tests"],
) -> str | None:
    """Why the calls ``chosen`` do not verify at the turn of ``event``, in a few words to count by; None when they do.

    ``env`` must still be in the episode of the event, or just behind its end. Raises ``EnvironmentLost``.
    """
    better = demand == "better_tests"
    try:
        tried = await _try(env, event, chosen, tests=better)
        if tried.error is not None and tried.error.cause is not Cause.USER:
            return FAILED if tried.error.cause is Cause.INFRA else tried.error.kind
        if not better:
            return None
        if "visible" not in tried.reward_parts:
            return NOT_COMPARABLE
        own = await _try(env, event, event.calls, tests=True)
    except Refused:
        return NOT_KEPT
    if own.error is not None and own.error.cause is Cause.INFRA:
        return FAILED
    is_better = tried.reward_parts["visible"] > own.reward_parts["visible"]
    return None if is_better else NOT_BETTER


async def _try(env: Environment, event: TurnEvent, calls: Sequence[ToolCall], *, tests: bool) -> ToolResult:
    then = [call.model_dump(include={"name", "arguments", "malformed"}) for call in calls[1:]]
    trial = Trial(before=event.step, then=then, tests=tests)
    return (await env.step(calls[0].model_copy(update={"trial": trial}))).observation
