"""What a run shows while it runs, read from its files."""

from __future__ import annotations

import io
import json
import time
from typing import Any

from rich.console import Console

from hintloop.cli.config import load_config
from hintloop.cli.display import Display, Reader, duration, plain_line
from hintloop.cli.runfolder import RunFolder
from hintloop.cli.status import rows


def say(run: RunFolder, part: str, **status: Any) -> None:
    (run.path / "status" / f"{part}.json").write_text(json.dumps(status))


def both_alive(run: RunFolder) -> None:
    now = time.time() + 1
    say(
        run,
        "rollout",
        state="playing episodes",
        since=now - 63,
        time=now,
        version=3,
        groups_journalled=5,
        episodes_per_s=12.4,
        success_rate=0.25,
        tool_errors={"type_error": 1, "edit_no_match": 7},
        hint_sites=8,
        teachers={"pairs": 4},
        lost={"engine": 2},
    )
    say(run, "learner", state="waiting for episodes", since=now - 2, updated=now, version=4, step=4)


def test_view_of_a_running_run(run: RunFolder) -> None:
    reader = Reader(run, load_config(file=run.config))
    both_alive(run)
    view = reader.look()
    assert view.episodes == 20
    assert (view.rollout_version, view.learner_version, view.step, view.steps) == (3, 4, 2, 8)
    assert list(view.errors) == ["edit_no_match", "type_error"]
    assert (view.hint_sites, view.pairs, view.lost) == (8, 4, {"engine": 2})
    assert view.losses == {"grpo": 0.4, "sdpo": 0.02}
    assert view.training_left_s == 360.0


def test_words_of_an_earlier_process_are_not_shown(run: RunFolder) -> None:
    both_alive(run)
    for part in ("rollout", "learner"):
        path = run.path / "status" / f"{part}.json"
        status = json.loads(path.read_text())
        say(run, part, **{**status, "time": 1.0, "updated": 1.0})
    view = Reader(run, load_config(file=run.config)).look()
    assert view.states == {"rollout": "starting", "learner": "starting"}


def test_one_line_says_who_waits_for_whom(run: RunFolder) -> None:
    reader = Reader(run, load_config(file=run.config))
    both_alive(run)
    line = plain_line(reader.look())
    assert "20 episodes (12/s) | solved 25 % | step 2/8 | plays version 3, 1 behind the learner" in line
    assert "rollout: playing episodes (1:0" in line
    assert "learner: waiting for episodes (" in line
    assert "loss reward 0.4, hints 0.02 | lost engine 2" in line


def test_without_a_terminal_lines_are_printed_now_and_then(run: RunFolder) -> None:
    written = io.StringIO()
    with Display(run, load_config(file=run.config), Console(file=written)) as display:
        display.refresh()
        display.refresh()
    lines = written.getvalue().splitlines()
    assert [line.startswith("held-out") for line in lines] == [True, True, True, True, False]
    assert lines[3].startswith("held-out after (version 2, heldmut, T=1): 50 % solved")


def test_on_a_terminal_there_is_a_live_panel(run: RunFolder) -> None:
    written = io.StringIO()
    console = Console(file=written, force_terminal=True, width=120)
    with Display(run, load_config(file=run.config), console) as display:
        both_alive(run)
        display.refresh()
    text = written.getvalue()
    assert "hintloop play: small" in text
    assert "edit_no_match 7" in text
    assert "8 hint sites, 4 preference pairs" in text


def test_a_run_without_files_can_be_shown(empty_run: RunFolder) -> None:
    view = Reader(empty_run, load_config(file=empty_run.config)).look()
    assert view.success is None
    assert "no weights yet" in plain_line(view)


def test_status_rows_name_state_and_silence(run: RunFolder) -> None:
    now = time.time()
    say(run, "learner", state="training step 3", since=now - 5, updated=now - 1, version=2)
    play, rollout, learner = rows(run)
    assert (play["state"], rollout["state"], learner["state"]) == (
        "not running",
        "never started",
        "training step 3",
    )
    assert 1.0 <= learner["silent_s"] < 5.0 <= learner["for_s"]
    with run.lock():
        assert rows(run)[0]["state"] == "running"


def test_durations() -> None:
    assert [duration(s) for s in (0.4, 59.9, 60, 3723)] == ["0 s", "59 s", "1:00", "1:02:03"]
