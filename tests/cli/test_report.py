"""The report of a run, made from its files alone."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hintloop.cli.plot import smoothed
from hintloop.cli.report import channel, held_out, write_report
from hintloop.cli.runfolder import RunFolder
from hintloop.rollout.status import write_json


def test_summary_counts_what_the_files_hold(run: RunFolder) -> None:
    summary, _ = write_report(run)
    assert summary["episodes"]["played"] == 4
    assert summary["episodes"]["groups"] == 2
    assert summary["episodes"]["outcomes"] == {"failed": 1, "solved": 3}
    assert summary["episodes"]["sampled_tokens"] == 16
    assert summary["tool_errors"] == {"file_not_found": 3}
    assert summary["hint_sites"] == {"file_not_found": 3}
    assert (summary["pairs"], summary["pairs_verified"]) == (3, 3)
    assert summary["weights"] == {"steps": 2, "versions": 3}
    assert summary["staleness"] == {"mean": 0.5, "max": 1.0}
    assert summary["finished"] is True
    assert summary["seconds"] == {
        "whole": 130.0,
        "training": 4.0,
        "learner waiting": 2.0,
        "publishing": 1.0,
        "evaluation": 40.0,
    }


def test_what_teachers_cost_is_told_beside_what_it_brought(run: RunFolder) -> None:
    assert "| spent on teachers " in write_report(run)[1]
    assert write_report(run)[0]["teachers"] == {"spent_usd": None, "pairs_per_usd": None}
    said = {"cost_usd": 0.5, "pairs_per_usd": 4.0}
    for ledger, spent, brought in (
        (None, 0.5, 4.0),
        ({"spent_usd": 1.5}, 1.5, 2.0),
        ({"spent_usd": 0}, 0, None),
    ):
        teachers = {**said, **({} if ledger is None else {"ledger": ledger})}
        write_json(run.path / "status" / "rollout.json", {"state": "finished", "teachers": teachers})
        summary, text = write_report(run)
        assert summary["teachers"] == {"spent_usd": spent, "pairs_per_usd": brought}
    assert "$0.00 " in text


def test_report_of_another_journal_that_is_not_kept(run: RunFolder, tmp_path: Path) -> None:
    before = sorted(run.path.iterdir())
    summary, text = write_report(run, str(tmp_path / "nothing"), keep=False)
    assert summary["episodes"]["played"] == 0
    assert text.startswith("# hintloop run")
    assert sorted(run.path.iterdir()) == before


def test_held_out_table_has_gain_and_margin(run: RunFolder) -> None:
    summary, text = write_report(run)
    sampled, greedy = summary["held_out"]
    assert (sampled["before"]["rate"], sampled["after"]["rate"]) == (0.3, 0.5)
    assert sampled["gain_points"] == pytest.approx(20.0)
    assert sampled["gain_margin_points"] == pytest.approx(
        196 * math.sqrt((61 * 141 + 101 * 101) / 202**3), rel=1e-3
    )
    assert (greedy["temperature"], greedy["after"], greedy["gain_points"]) == (0.0, None, None)
    assert (
        "| heldmut | T=1      | 30.0 % (24 % to 36 %) | 50.0 % (44 % to 56 %) | +20.0 ± 9.4 points |" in text
    )


def test_few_tasks_have_a_wide_margin() -> None:
    none_solved = {"split": "heldout", "temperature": 1.0, "version": 0, "n": 2, "solved": 0, "rate": 0.0}
    rows = [{**none_solved, "label": label, "low": 0.0, "high": 0.7} for label in ("before", "after")]
    assert held_out(rows)[0]["gain_margin_points"] > 50


def test_files_are_written(run: RunFolder) -> None:
    summary, text = write_report(run)
    assert json.loads((run.path / "summary.json").read_text()) == summary
    assert (run.path / "report.md").read_text() == text + "\n"
    assert (run.path / "report.png").read_bytes().startswith(b"\x89PNG")


def test_a_channel_without_inputs_is_absent_not_zero() -> None:
    steps = [{"step": 1, "loss_grpo": 0.5, "tokens": 10}, {"step": 2, "loss_grpo": 0.3, "tokens": 5}]
    assert channel("grpo", steps) == {
        "live": True,
        "steps": 2,
        "inputs": 15,
        "loss_first": 0.5,
        "loss_last": 0.3,
        "grad_norm": None,
    }
    assert channel("dpo", steps)["live"] is False
    assert channel("dpo", steps)["loss_last"] is None


def test_an_example_shows_call_error_hint_and_teacher(run: RunFolder) -> None:
    _, text = write_report(run)
    assert "g1-1: task bugfix/first.0.0, version 1, solved, reward 1.0" in text
    assert "agent: read_file(path='nowhere.py')" in text
    assert "! tool error file_not_found (cause: model)" in text
    assert "> hint before this turn, for the teacher's eyes only: files are solution.py" in text
    assert "> expert would rather: read_file {}" in text
    assert "An episode that did not get over its tool error" in text


def test_a_task_failed_before_and_solved_after_is_the_second_example(
    run: RunFolder, keep_example: Callable[..., None]
) -> None:
    keep_example("before", 0, 0, solved=True)
    keep_example("after", 2, 0, solved=True)
    keep_example("before", 0, 1, solved=False)
    keep_example("after", 2, 1, solved=True)
    _, text = write_report(run)
    assert "The same held-out task before and after" in text
    assert "before-v0-heldmut-t1-0001" in text
    assert "after-v2-heldmut-t1-0001" in text
    assert "heldmut-t1-0000" not in text


def test_a_run_that_has_just_begun_has_a_report(empty_run: RunFolder) -> None:
    summary, text = write_report(empty_run)
    assert summary["finished"] is False
    assert summary["episodes"]["played"] == 0
    assert held_out([]) == summary["held_out"] == []
    assert "nothing yet" in text


@given(st.lists(st.floats(-1e3, 1e3), max_size=30), st.integers(1, 8))
def test_smoothing_is_a_trailing_mean(values: list[float], window: int) -> None:
    expected = [
        sum(values[max(0, i + 1 - window) : i + 1]) / len(values[max(0, i + 1 - window) : i + 1])
        for i in range(len(values))
    ]
    assert smoothed(values, window) == pytest.approx(expected, abs=1e-6)
