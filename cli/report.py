"""What a run brought: numbers as JSON, a report as Markdown, and a picture.

The journal, the evaluation rows and the learner's metrics are the only sources, so a report can be made of a
run that still goes on, that was killed, or that lies on another machine.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

from hintloop.cli.config import load_config
from hintloop.cli.display import CHANNELS, duration, percent, sampling_name
from hintloop.cli.examples import changed_examples, describe
from hintloop.cli.runfolder import RunFolder, read_lines, write_text
from hintloop.cli.tally import Tally, tally
from hintloop.cli.view.text import dollars
from hintloop.replay.episode import Episode
from hintloop.replay.journal import Journal
from hintloop.rollout.asking import per_usd

Z95 = 1.959964
_INPUTS = {"grpo": "tokens", "sdpo": "sites", "dpo": "pairs"}
"""What goes into a channel, as the learner counts it."""


def write_report(
    folder: RunFolder, journal: str | None = None, *, keep: bool = True
) -> tuple[dict[str, Any], str]:
    """The summary and the text, of the folder's journal or another one.

    ``keep``: ``summary.json``, ``report.md`` and ``report.png`` are written into the folder.
    """
    counted = tally(_segments(Journal(journal or folder.journal)))
    evaluations, steps = read_lines(folder.evaluation), read_lines(folder.metrics("learner"))
    summary = summarise(folder, counted, evaluations, steps)
    text = render(summary, _examples(folder, counted))
    if keep:
        from hintloop.cli.plot import draw

        draw(folder.path / "report.png", counted.groups, evaluations, steps)
        write_text(folder.path / "summary.json", json.dumps(summary, indent=1) + "\n")
        write_text(folder.path / "report.md", text + "\n")
    return summary, text


def _segments(journal: Journal) -> Iterator[list[Episode]]:
    """Segment by segment; damaged ones are left out, with a warning."""
    reader = journal.reader()
    while segment := reader.poll_segment():
        yield segment.episodes


def summarise(
    folder: RunFolder, counted: Tally, evaluations: Sequence[dict[str, Any]], steps: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """All numbers of the report, JSON-able."""
    config = load_config(file=folder.config)
    plays, rollout = read_lines(folder.plays), folder.status("rollout") or {}
    return {
        "run": folder.path.name,
        "folder": str(folder.path),
        "seed": config.run.seed,
        "student": config.student.model,
        "finished": any(row["label"] == "after" for row in evaluations),
        "starts": len(plays),
        "trained_split": config.rollout.split,
        "held_out": held_out(evaluations),
        "evaluations": [_only(row, "label version split temperature n rate low high") for row in evaluations],
        "episodes": {
            "played": counted.episodes,
            "groups": len(counted.groups),
            "outcomes": dict(counted.outcomes),
            "turns": counted.turns,
            "sampled_tokens": counted.sampled_tokens,
            "equal_groups": counted.equal_groups,
            "resampled_groups": len(read_lines(folder.metrics("resampled"))),
            "lost": rollout.get("lost", {}),
            "failures": rollout.get("failures", {}),
        },
        "tool_errors": dict(counted.errors.most_common()),
        "tool_errors_by_agent": counted.model_errors,
        "hint_sites": dict(counted.hint_sites.most_common()),
        "pairs": counted.pairs,
        "pairs_verified": counted.verified_pairs,
        "teachers": spending(rollout.get("teachers", {}), counted.pairs),
        "channels": {name: channel(name, steps) for name in CHANNELS},
        "weights": {"steps": len(steps), "versions": 1 + max((row["version"] for row in steps), default=0)},
        "staleness": {
            "mean": _mean(steps, "staleness_mean"),
            "max": max((row["staleness_max"] for row in steps if "staleness_max" in row), default=None),
        },
        "seconds": _seconds(plays, evaluations, steps, counted),
    }


def spending(teachers: Mapping[str, Any], pairs: int) -> dict[str, Any]:
    """What the teachers cost and what came of a dollar; without a ledger, in the last rollout process alone."""
    ledger = teachers.get("ledger")
    if ledger is None:
        return {
            "spent_usd": teachers.get("cost_usd"),
            "pairs_per_usd": teachers.get("pairs_per_usd"),
        }
    spent = ledger["spent_usd"]
    return {"spent_usd": spent, "pairs_per_usd": per_usd(pairs, spent)}


def held_out(evaluations: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Before and after, per split and temperature; what was not measured is None. Gains are in points."""
    keys = dict.fromkeys((row["split"], row["temperature"]) for row in evaluations)
    made = []
    for split, temperature in keys:
        rows = [row for row in evaluations if (row["split"], row["temperature"]) == (split, temperature)]
        before = next((row for row in rows if row["label"] == "before"), None)
        after = next((row for row in reversed(rows) if row["label"] == "after"), None)
        gain, margin = _gain(before, after) if before and after else (None, None)
        made.append(
            {
                "split": split,
                "temperature": temperature,
                "before": _only(before, "version n solved rate low high") if before else None,
                "after": _only(after, "version n solved rate low high") if after else None,
                "gain_points": gain,
                "gain_margin_points": margin,
            }
        )
    return made


def channel(name: str, steps: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """How a channel was fed and what its loss did; ``live`` says whether it ever had a loss."""
    losses = [row[f"loss_{name}"] for row in steps if f"loss_{name}" in row]
    norms = [row[f"grad_norm_{name}"] for row in steps if f"grad_norm_{name}" in row]
    part = max(len(losses) // 10, 1)
    return {
        "live": bool(losses),
        "steps": len(losses),
        "inputs": sum(int(row.get(_INPUTS[name], 0)) for row in steps),
        "loss_first": fmean(losses[:part]) if losses else None,
        "loss_last": fmean(losses[-part:]) if losses else None,
        "grad_norm": fmean(norms) if norms else None,
    }


def render(summary: Mapping[str, Any], examples: Sequence[tuple[str, str]]) -> str:
    """The report as Markdown that can be read as plain text, too. ``examples`` are titles and texts."""
    episodes, seconds = summary["episodes"], summary["seconds"]
    parts = [
        f"# hintloop run {summary['run']}",
        f"Student {summary['student']}, seed {summary['seed']}; "
        + ("finished." if summary["finished"] else "not finished.")
        + (f" Started {summary['starts']} times." if summary["starts"] > 1 else ""),
        "## Held-out success (95 % interval)",
        _table([_held_out_row(row, summary["trained_split"]) for row in summary["held_out"]]),
        "## Channels of the loss",
        _table([_channel_row(name, row) for name, row in summary["channels"].items()]),
        "## Counts",
        _table(
            [
                {"what": "episodes", "count": f"{episodes['played']} in {episodes['groups']} groups"},
                {"what": "outcomes", "count": _counts(episodes["outcomes"])},
                {
                    "what": "groups with equal rewards",
                    "count": f"{episodes['equal_groups']}; {episodes['resampled_groups']} more played anew",
                },
                {"what": "lost to the infrastructure, replaced", "count": _counts(episodes["lost"])},
                {"what": "failures, by part", "count": _counts(episodes["failures"])},
                {"what": "tool errors", "count": _counts(summary["tool_errors"])},
                {"what": "hint sites", "count": _counts(summary["hint_sites"])},
                {"what": "preference pairs", "count": str(summary["pairs"])},
                {"what": "spent on teachers", "count": _spent(summary["teachers"])},
                {"what": "weight versions", "count": str(summary["weights"]["versions"])},
                {"what": "staleness, versions", "count": _staleness(summary["staleness"])},
                {"what": "time", "count": ", ".join(f"{k} {duration(v)}" for k, v in seconds.items() if v)},
            ]
        ),
        *(f"## {title}\n\n```\n{text}\n```" for title, text in examples),
        f"Picture: {summary['folder']}/report.png; all numbers: {summary['folder']}/summary.json",
    ]
    return "\n\n".join(parts)


def _examples(folder: RunFolder, counted: Tally) -> list[tuple[str, str]]:
    """Two episodes: one that recovered from its error, and one task before and after (or one that failed)."""
    made = []
    if counted.recovered is not None:
        made.append(("An episode that got over its tool error", describe(counted.recovered)))
    changed = changed_examples(folder.path / "examples")
    if changed is not None:
        text = "\n\n".join(describe(episode) for episode in changed)
        made.append(("The same held-out task before and after", text))
    elif counted.unrecovered is not None:
        made.append(("An episode that did not get over its tool error", describe(counted.unrecovered)))
    return made


def _gain(before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[float, float]:
    """Difference in points and its 95 % margin; the tasks are the same, the samples independent.

    The margin is that of Agresti and Caffo (2000), with a success and a failure added to each side: none of two
    solved before and after does not mean that nothing can have changed.
    """
    sides = [(row["n"] + 2, (row["solved"] + 1) / (row["n"] + 2)) for row in (before, after)]
    variance = sum(rate * (1 - rate) / n for n, rate in sides)
    return 100 * (after["rate"] - before["rate"]), 100 * Z95 * math.sqrt(variance)


def _seconds(
    plays: Sequence[Mapping[str, Any]],
    evaluations: Sequence[Mapping[str, Any]],
    steps: Sequence[Mapping[str, Any]],
    counted: Tally,
) -> dict[str, float | None]:
    """Wall times; ``whole`` spans from the first start to the last sign of life, pauses included."""
    times = [row["time"] for row in (*evaluations, *steps)] + [point.time for point in counted.groups]
    return {
        "whole": max(times) - plays[0]["time"] if times and plays else None,
        "training": sum(row["seconds_training"] for row in steps),
        "learner waiting": sum(row["seconds_waiting"] for row in steps),
        "publishing": sum(row["seconds_publishing"] for row in steps),
        "evaluation": sum(row["seconds"] for row in evaluations),
    }


def _held_out_row(row: Mapping[str, Any], trained: str) -> dict[str, str]:
    gain = row["gain_points"]
    return {
        "tasks": row["split"] + (" (trained on, nothing is held out)" if row["split"] == trained else ""),
        "sampling": sampling_name(row["temperature"]),
        "before": _rate(row["before"]),
        "after": _rate(row["after"]),
        "gain": "-" if gain is None else f"{gain:+.1f} ± {row['gain_margin_points']:.1f} points",
        "n": "/".join(str(each["n"]) for each in (row["before"], row["after"]) if each),
    }


def _rate(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return "-"
    return f"{100 * row['rate']:.1f} % ({percent(row['low'])} to {percent(row['high'])})"


def _channel_row(name: str, row: Mapping[str, Any]) -> dict[str, str]:
    return {
        "channel": f"{CHANNELS[name]} ({name})",
        "steps": str(row["steps"]) if row["live"] else "absent",
        "inputs": f"{row['inputs']} {_INPUTS[name]}",
        "loss, first tenth": _number(row["loss_first"]),
        "loss, last tenth": _number(row["loss_last"]),
        "gradient norm": _number(row["grad_norm"]),
    }


def _staleness(row: Mapping[str, Any]) -> str:
    return f"mean {_number(row['mean'])}, at most {_number(row['max'])}"


def _spent(row: Mapping[str, Any]) -> str:
    if row["spent_usd"] is None:
        return "nobody was asked"
    brought = "" if row["pairs_per_usd"] is None else f"; {row['pairs_per_usd']:.3g} pairs per dollar"
    return f"{dollars(row['spent_usd'])}{brought}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _counts(counts: Mapping[str, int]) -> str:
    shown = ", ".join(f"{name} {count}" for name, count in counts.items())
    return f"{sum(counts.values())}: {shown}" if counts else "0"


def _mean(rows: Sequence[Mapping[str, Any]], name: str) -> float | None:
    values = [row[name] for row in rows if name in row]
    return fmean(values) if values else None


def _only(row: Mapping[str, Any], names: str) -> dict[str, Any]:
    return {name: row[name] for name in names.split()}


def _table(rows: Sequence[Mapping[str, str]]) -> str:
    """A Markdown table with aligned columns; a line that says so when there is nothing."""
    if not rows:
        return "nothing yet"
    widths = {name: max(len(name), *(len(row[name]) for row in rows)) for name in rows[0]}
    lines = [
        "| " + " | ".join(value.ljust(widths[name]) for name, value in row.items()) + " |"
        for row in ({name: name for name in widths}, {name: "-" * widths[name] for name in widths}, *rows)
    ]
    return "\n".join(lines)
