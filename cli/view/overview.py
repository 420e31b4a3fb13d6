"""What the page of a run says: facts, tables and charts out of ``RunData``, ready for the template."""

from __future__ import annotations

import time
from typing import Any

from hintloop.cli.display import CHANNELS, duration, sampling_name
from hintloop.cli.report import held_out
from hintloop.cli.view import curves
from hintloop.cli.view.charts import bar, spark
from hintloop.cli.view.data import RunData, Track, as_number
from hintloop.cli.view.processes import badge, lag, last_word, processes, verdict
from hintloop.cli.view.teachers import Teachers, teachers
from hintloop.cli.view.text import DASH, dollars, name, number, percent
from hintloop.envs.errors import KINDS, Cause

MAX_SERVERS = 64
_INPUTS = {"grpo": "tokens", "sdpo": "sites", "dpo": "pairs"}


def overview(data: RunData, segments: int | None) -> dict[str, Any]:
    """All that the template of a run needs. ``segments``: in the journal, None when it cannot be listed."""
    word, mood = badge(data)
    parts, asked = processes(data), teachers(data.status["rollout"])
    step, steps = data.steps.last("step"), as_number(data.setting("learner", "steps"))
    return {
        "badge": word,
        "mood": mood,
        "facts": _facts(data, segments),
        "progress": (number(step), number(steps), step / steps) if step and steps else None,
        "tiles": _tiles(data, asked),
        "success": curves.success(data),
        "held_out": _held_out(data),
        "losses": [_channel(data, channel) for channel in CHANNELS],
        "processes": parts,
        "verdict": verdict(parts),
        "servers": _servers(data.status["rollout"].get("servers")),
        "charts": [curves.lag(data), curves.episode_rate(data), curves.token_rate(data)],
        "step_time": curves.step_time(data),
        "errors": _errors(data),
        "counts": _counts(data),
        "teachers": asked,
    }


def _facts(data: RunData, segments: int | None) -> list[str]:
    made = []
    if student := data.setting("student", "model"):
        made.append(f"student {name(str(student))}")
    if data.setting("run", "seed") is not None:
        made.append(f"seed {data.setting('run', 'seed')}")
    words = [last_word(said) for said in data.status.values() if said]
    end = max(words, default=time.time()) if badge(data)[0] != "live" else time.time()
    made.append(duration(max(end - data.started, 0.0)))
    if segments is not None:
        made.append(f"{segments:,} journal segments")
    if len(data.plays) > 1:
        made.append(f"started {len(data.plays)} times")
    return made


def _tiles(data: RunData, asked: Teachers) -> list[tuple[str, str, str]]:
    """Label, value, and a note below."""
    groups, steps, rollout = data.groups, data.steps, data.status["rollout"]
    solved, episodes = groups.now("solved"), groups.now("episodes")
    success = solved / episodes if solved is not None and episodes else steps.now("solved")
    rate = as_number(rollout.get("episodes_per_s"))
    episodes_all, hints, pairs = (
        number(groups.total(each) if groups.lines else None) for each in ("episodes", "hint_sites", "pairs")
    )
    return [
        ("Success now", percent(success, 0), _over("groups", groups) or _over("steps", steps)),
        _held_out_tile(data),
        (
            "Episodes",
            episodes_all,
            f"{number(groups.lines)} groups, {number(rate)} episodes/s now",
        ),
        ("Optimizer steps", number(steps.lines), f"weight version {number(steps.last('version'))}"),
        (
            "Versions behind",
            number(lag(data)),
            f"trained on: mean {number(steps.mean('staleness_mean'))} behind",
        ),
        ("Hint sites", hints, f"{number(steps.total('sites'))} trained on"),
        ("Preference pairs", pairs, f"{number(steps.total('pairs'))} trained on"),
        (
            "Teachers cost",
            dollars(asked.spent),
            f"{number(asked.answers)} answers" if asked.asked else "no teachers",
        ),
    ]


def _over(what: str, track: Track) -> str:
    return f"share solved in the last {len(track.recent)} {what}" if track.recent else ""


def _held_out_tile(data: RunData) -> tuple[str, str, str]:
    """All splits together, at the highest temperature: the newest evaluation against the first."""
    rows = list(data.evaluations)
    top = max((row["temperature"] for row in rows), default=None)
    rates = []
    for version in sorted({row["version"] for row in rows}):
        chosen = [row for row in rows if (row["version"], row["temperature"]) == (version, top)]
        if tasks := sum(row["n"] for row in chosen):
            rates.append(sum(row["solved"] for row in chosen) / tasks)
    if not rates or top is None:
        return "Held-out success", DASH, "not measured yet"
    gain = (
        f"{100 * (rates[-1] - rates[0]):+.1f} points since the start" if len(rates) > 1 else "before training"
    )
    return f"Held-out success, {sampling_name(top)}", percent(rates[-1]), gain


def _held_out(data: RunData) -> list[dict[str, Any]]:
    """The rows of the report, with the newest evaluation on the way where there is none after the run yet."""
    made = []
    for row in held_out(list(data.evaluations)):
        key = (row["split"], row["temperature"])
        during = [each for each in data.evaluations if (each["split"], each["temperature"]) == key]
        made.append(
            {
                "split": name(row["split"]),
                "sampling": sampling_name(row["temperature"]),
                "before": row["before"],
                "after": row["after"] or (during[-1] if len(during) > 1 else None),
                "gain": row["gain_points"],
                "margin": row["gain_margin_points"],
            }
        )
    return made


def _channel(data: RunData, channel: str) -> dict[str, Any]:
    steps, inputs = data.steps, _INPUTS[channel]
    live = f"loss_{channel}" in steps.sums
    facts = [
        ("now", number(steps.now(f"loss_{channel}"))),
        ("steps", number(steps.sums[f"loss_{channel}"].count if live else 0)),
        (inputs, number(steps.total(inputs))),
        ("gradient norm", number(steps.mean(f"grad_norm_{channel}"))),
    ]
    return {"facts": facts, "chart": curves.loss(data, channel)}


def _errors(data: RunData) -> list[dict[str, Any]]:
    counts = data.groups.errors()
    most = max(counts.values(), default=0)
    made = []
    for kind, count in counts.items():
        cause = KINDS.get(kind)
        rates = curves.errors_per_episode(data, kind)
        made.append(
            {
                "kind": name(kind),
                "cause": str(cause) if cause else "registered elsewhere",
                "count": number(count),
                "bar": bar(count / most if most else 0.0, 2 if cause is Cause.MODEL else 4),
                "first": number(100 * rates[0] if rates else None),
                "last": number(100 * rates[-1] if rates else None),
                "spark": spark(rates),
            }
        )
    return made


def _counts(data: RunData) -> list[tuple[str, str]]:
    groups, rollout = data.groups, data.status["rollout"]
    episodes, solved, truncated = (groups.total(each) for each in ("episodes", "solved", "truncated"))
    rows = [
        ("episodes", f"{number(episodes)} in {number(groups.lines)} groups"),
        ("solved", number(solved)),
        ("failed", number(episodes - solved - truncated)),
        ("truncated", number(truncated)),
        ("turns", number(groups.total("turns"))),
        ("sampled tokens", number(groups.total("sampled_tokens"))),
        ("weight versions", number(1 + (data.steps.most("version") or 0))),
        ("staleness at most", number(data.steps.most("staleness_max"))),
        ("evaluation", duration(sum(row["seconds"] for row in data.evaluations))),
    ]
    for key, words in (
        ("lost", "lost to the infrastructure"),
        ("dropped_sites", "errors without a hint site"),
    ):
        counts = rollout.get(key)
        if isinstance(counts, dict) and counts:
            rows += [
                (words, f"{name(str(why))}: {number(as_number(count))}") for why, count in counts.items()
            ]
    return rows


def _servers(value: Any) -> list[dict[str, Any]]:
    return [each for each in value[:MAX_SERVERS] if isinstance(each, dict)] if isinstance(value, list) else []
