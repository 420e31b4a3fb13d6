"""The files of a run: followed while they grow, and held by one process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hintloop.cli.errors import UserError
from hintloop.cli.runfolder import LineTail, RunFolder, append_line, existing, read_lines, write_text


def test_lines_are_followed_and_half_a_line_waits(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    tail = LineTail(path)
    tail.read()
    assert tail.lines == []
    path.write_text('{"a": 1}\n{"a": ')
    tail.read()
    assert tail.lines == [{"a": 1}]
    path.write_text('{"a": 1}\n{"a": 2}\n')
    tail.read()
    assert tail.lines == [{"a": 1}, {"a": 2}]


def test_a_file_that_was_cut_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text('{"a": 1}\n{"a": 2}\n')
    tail = LineTail(path)
    tail.read()
    path.write_text('{"a": 1}\n')
    tail.read()
    assert tail.lines == [{"a": 1}]


def test_only_the_newest_lines_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    for number in range(5):
        append_line(path, number=number)
    tail = LineTail(path, keep=2)
    tail.read()
    assert [line["number"] for line in tail.lines] == [3, 4]


def test_damaged_lines_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_bytes(b'{"a": 1}\n\xff{\n[1]\n{"a": 2}\n')
    assert read_lines(path) == [{"a": 1}, {"a": 2}]


def test_a_status_that_is_missing_or_damaged_is_none(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert folder.status("learner") is None
    (tmp_path / "status").mkdir()
    (tmp_path / "status" / "learner.json").write_text("{")
    assert folder.status("learner") is None
    write_text(tmp_path / "status" / "learner.json", json.dumps({"state": "x"}))
    assert folder.status("learner") == {"state": "x"}


def test_a_run_is_held_by_one_process(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    with (
        folder.lock(),
        pytest.raises(UserError, match="another hintloop play is at work"),
        RunFolder(tmp_path).lock(),
    ):
        pass
    with folder.lock():
        assert (tmp_path / ".lock").exists()


def test_a_folder_without_config_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not the folder of a run"):
        existing(tmp_path)
