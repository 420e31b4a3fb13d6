"""``hintloop status``: what the parts of a run say of themselves."""

from __future__ import annotations

import time
from typing import Any

from hintloop.cli.display import last_word
from hintloop.cli.errors import UserError
from hintloop.cli.runfolder import PARTS, RunFolder


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
    return {
        "part": name,
        "state": said["state"],
        "for_s": round(now - said["since"], 1),
        "silent_s": round(now - last_word(said), 1),
        "version": said.get("version"),
    }
