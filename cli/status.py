"""``hintloop status``: what the parts of a run say of themselves, and who waits for whom."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from hintloop.cli.display import last_word
from hintloop.cli.errors import UserError
from hintloop.cli.output import show, show_json
from hintloop.cli.runfolder import PARTS, RunFolder

SILENT_S = 15.0
"""A part that says nothing for so long is hung, killed, or has lost its disk."""
_COUNTS = {
    "episodes": "episodes finished",
    "episodes_per_s": "per second, of late",
    "success_rate": "solved, share of late",
    "in_flight": "episodes in flight",
    "waiting_for_environment": "of these, waiting for an environment",
    "groups_journalled": "groups in the journal",
    "groups_playing": "groups being played",
    "groups_held": "groups held back for older ones",
    "groups_dropped": "groups lost",
    "groups_equal": "groups with equal rewards",
    "groups_resampled": "groups played anew for that",
    "waited_s": "seconds waited for the learner",
    "hint_sites": "hint sites",
    "render_failures": "episodes cut short by the chat template",
    "pairs": "preference pairs",
}
_BY_NAME = {
    "lost": "episodes lost",
    "failures": "failures by part",
    "tool_errors": "tool errors",
    "dropped_sites": "hint sites dropped",
    "sampling_overridden": "agent programs' sampling settings not applied",
}
_TEACHERS = {
    "asked_turns": "turns that teachers were asked about",
    "cost_usd": "US dollars for pairs",
    "pairs_per_usd": "pairs per US dollar",
}
_LEDGER = {
    "spent_usd": "US dollars spent in the whole run",
    "reserved_usd": "US dollars held for questions under way",
    "left_usd": "US dollars left of the budget",
}
_SERVERS = {"servers": "engine", "env_servers": "environment"}


def print_status(folder: RunFolder, *, as_json: bool) -> None:
    """Print all that is known; as JSON, one object."""
    found = look(folder)
    if as_json:
        show_json(found)
        return
    show(found["parts"], as_json=False)
    for name, title in (
        ("waits", "Who waits for whom"),
        ("servers", "Servers"),
        ("counts", "Since the rollout process started"),
    ):
        if found[name]:
            show(found[name], as_json=False, title=title)


def look(folder: RunFolder) -> dict[str, Any]:
    """``parts``, ``waits``, ``servers`` and ``counts``, each a list of rows."""
    said, learner = folder.status("rollout") or {}, folder.status("learner") or {}
    return {
        "parts": rows(folder),
        "waits": _waits(said),
        "servers": _servers(said),
        "counts": _counts(said, learner),
    }


def rows(folder: RunFolder) -> list[dict[str, Any]]:
    """One row for the run and one per part; ``silent_s`` is how long ago it last said something."""
    return [_play(folder), *(_part(folder, name) for name in PARTS)]


def _play(folder: RunFolder) -> dict[str, Any]:
    try:
        with folder.lock():
            state = "not running"
    except UserError:
        state = "running"
    return {"part": "play", "state": state, "for_s": None, "silent_s": None, "version": None}


def _part(folder: RunFolder, name: str) -> dict[str, Any]:
    said, now = folder.status(name), time.time()
    if said is None:
        return {"part": name, "state": "never started", "for_s": None, "silent_s": None, "version": None}
    silent = now - last_word(said)
    return {
        "part": name,
        "state": said["state"] + _trouble(said, silent),
        "for_s": round(now - said["since"], 1),
        "silent_s": round(silent, 1),
        "version": said.get("version"),
    }


def _trouble(said: Mapping[str, Any], silent: float) -> str:
    """What keeps a part from going on, if something does."""
    loop = said.get("loop", {})
    if "blocked_s" in loop:
        return f"; its event loop is blocked in {loop['where']}"
    stuck = [wait for wait in _waits(said) if wait["stuck"]]
    if stuck:
        first = stuck[0]
        return f"; {first['longest']} waits for {first['waits_for']} for {first['for_s']:.0f} s"
    running = not said["state"].startswith(("finished", "failed", "stopped", "ended"))
    return "; no word since" if running and silent > SILENT_S else ""


def _waits(said: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [dict(wait) for wait in said.get("waits", [])]


def _servers(said: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [
        {
            "kind": kind,
            "url": server["url"],
            "state": server["state"],
            "in_use": server.get("in_use", server.get("in_flight")),
            "version": server.get("version"),
            "reason": server["reason"],
        }
        for key, kind in _SERVERS.items()
        for server in said.get(key, [])
    ]


def _counts(said: Mapping[str, Any], learner: Mapping[str, Any]) -> list[dict[str, Any]]:
    found: list[tuple[str, Any]] = [(words, said[name]) for name, words in _COUNTS.items() if name in said]
    for name, words in _BY_NAME.items():
        found += [(f"{words}: {why}", count) for why, count in said.get(name, {}).items()]
    teachers = said.get("teachers", {})
    for names, account in ((_TEACHERS, teachers), (_LEDGER, teachers.get("ledger", {}))):
        found += [(words, account[name]) for name, words in names.items() if account.get(name) is not None]
    played, published = said.get("version"), learner.get("version")
    if played is not None and published is not None:
        found.append(("versions behind the learner", max(published - played, 0)))
    found += [(f"event loop {name}", value) for name, value in said.get("loop", {}).items()]
    return _table(found)


def _table(found: Sequence[tuple[str, Any]]) -> list[dict[str, Any]]:
    return [{"what": what, "count": count} for what, count in found]
