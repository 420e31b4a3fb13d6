"""Episodes as ATIF 1.8 trajectories, one JSON file each.

The format has no place for outcomes, errors and exit codes: they go to ``extra.hintloop``, where our own reader
finds them again, and a failed result also gets the flag that Harbor writes. Sampled tokens are in the metrics of
their step. Preference pairs are not part of a trajectory.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from hashlib import blake2b
from importlib.metadata import version
from typing import Any

from hintloop.replay.episode import Episode, HintSite, Turn
from hintloop.replay.export.chat import answers_to, arguments_object
from hintloop.replay.ingest.atif import EXTRA
from hintloop.replay.ingest.episodes import NO_RESULT
from hintloop.replay.storage import Store
from hintloop.replay.supplement import is_supplement

SCHEMA_VERSION = "ATIF-v1.8"
_SOURCES = {"system": "system", "assistant": "agent"}
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")
_OURS = frozenset(["rollout", "evaluation"])
_NAME_CHARS = 60


def export_atif(segments: Iterable[Iterable[Episode]], uri: str) -> Counter[str]:
    """Write each episode to its own file in a folder; the same episode goes to the same file again. ``OSError``."""
    store, counts = Store(uri), Counter(trajectories=0)
    for episode in (episode for episodes in segments for episode in episodes):
        counts["left_out: pairs"] += len(episode.pairs)
        if is_supplement(episode):  # its conversation is in the journal by itself
            continue
        data = json.dumps(trajectory(episode), ensure_ascii=False, allow_nan=False)
        store.replace(file_name(episode.episode_id), data.encode("utf-8", "replace") + b"\n")
        counts["trajectories"] += 1
    return +counts if counts["trajectories"] else counts


def file_name(episode_id: str) -> str:
    """A name that holds as much of the id as a file name may, and tells any two ids apart."""
    digest = blake2b(episode_id.encode("utf-8", "surrogatepass"), digest_size=6).hexdigest()
    return f"{_UNSAFE.sub('-', episode_id)[:_NAME_CHARS].strip('-.')}-{digest}.json"


def trajectory(episode: Episode) -> dict[str, Any]:
    """The document of one episode. ``ValueError`` for one without turns, which the format does not have."""
    if not episode.turns:
        raise ValueError(f"{episode.episode_id} has no turns, and a trajectory needs a step")
    steps = _steps(episode)
    for number, step in enumerate(steps, 1):
        step["step_id"] = number
    if episode.created_at:
        steps[-1]["timestamp"] = datetime.fromtimestamp(episode.created_at, UTC).isoformat()
    ours = episode.source in _OURS
    agent = (
        {"name": "hintloop", "version": version("hintloop")}
        if ours
        else {"name": episode.source, "version": "unknown"}
    )
    about = {
        name: getattr(episode, name)
        for name in ("group_id", "task_id", "env", "source", "reward", "reward_parts")
    }
    return {
        "schema_version": SCHEMA_VERSION,
        "session_id": episode.episode_id,
        "trajectory_id": episode.episode_id,
        "agent": {**agent, **({"model_name": episode.model} if episode.model else {})},
        "steps": steps,
        "final_metrics": {"total_steps": len(steps)},
        "extra": {EXTRA: {**about, "outcome": str(episode.outcome)}},
    }


def _steps(episode: Episode) -> list[dict[str, Any]]:
    sites = {site.turn: site for site in episode.hint_sites}
    steps: list[dict[str, Any]] = []
    follows = False
    for number, turn in enumerate(episode.turns):
        if turn.role == "assistant":
            steps.append(_agent_step(episode, number, sites.get(number)))
        elif turn.role != "tool":
            steps.append({"source": _SOURCES.get(turn.role, "user"), "message": turn.text})
        elif not follows:
            steps.append({"source": "user", "message": turn.text, "extra": {EXTRA: {"role": "tool"}}})
        follows = turn.role == "assistant" or (turn.role == "tool" and follows)
    return steps


def _agent_step(episode: Episode, number: int, site: HintSite | None) -> dict[str, Any]:
    turn, answers = episode.turns[number], answers_to(episode.turns, number)
    calls, results = _calls(number, turn, answers)
    own = {name: getattr(turn, name) for name in ("error_kind", "error_message", "error_cause")}
    own = {name: value for name, value in own.items() if value is not None}
    if site is not None and site.hint:
        own["hint"] = site.hint
    step: dict[str, Any] = {"source": "agent", "message": turn.text}
    if calls:
        step["tool_calls"] = calls
    if results:
        step["observation"] = {"results": results}
    if metrics := _metrics(episode, turn):
        step["metrics"] = metrics
    return {**step, "extra": {EXTRA: own}} if own else step


def _calls(
    number: int, turn: Turn, answers: Sequence[Turn]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The calls of a turn and their results; a call without a name could not be read, and only has a result."""
    calls, results = [], []
    for place, answer in enumerate(answers):
        given = answer.tool_arguments or (turn.tool_arguments if not place else None)
        call_id = f"call_{number}_{place}" if answer.tool_name else None
        if call_id is not None:
            calls.append(_call(call_id, answer.tool_name or "", given))
        if call_id is None or answer.error_message != NO_RESULT:
            failed = turn.error_kind is not None and (len(answers) == 1 or answer.exit_code not in (None, 0))
            results.append(_result(answer, call_id, failed))
    if not answers and turn.tool_name:
        calls.append(_call(f"call_{number}_0", turn.tool_name, turn.tool_arguments))
    return calls, results


def _call(call_id: str, name: str, text: str | None) -> dict[str, Any]:
    arguments = arguments_object(text)
    call: dict[str, Any] = {"tool_call_id": call_id, "function_name": name, "arguments": arguments}
    if text is not None and json.dumps(arguments, ensure_ascii=False, separators=(",", ":")) != text:
        call["extra"] = {EXTRA: {"arguments": text}}
    return call


def _result(answer: Turn, call_id: str | None, failed: bool) -> dict[str, Any]:
    own: dict[str, Any] = {"exit_code": answer.exit_code, "seconds": answer.seconds}
    extra: dict[str, Any] = {EXTRA: own if call_id is not None else {**own, "role": "tool"}}
    if failed:
        extra["tool_result_is_error"] = True
    source = {} if call_id is None else {"source_call_id": call_id}
    return {**source, "content": answer.text, "extra": extra}


def _metrics(episode: Episode, turn: Turn) -> dict[str, Any]:
    """Sampled tokens, where the episode has them, with log-probabilities where all are known."""
    ids = [int(token) for token in episode.token_ids[turn.start : turn.end]]
    if not ids:
        return {}
    logprobs = [float(value) for value in episode.logprobs[turn.start : turn.end]]
    known = {"logprobs": logprobs} if all(map(math.isfinite, logprobs)) else {}
    return {
        "prompt_tokens": turn.start,
        "completion_tokens": len(ids),
        "completion_token_ids": ids,
        **known,
    }
