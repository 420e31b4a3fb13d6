"""``hintloop setup``: a run folder that its parts find as ``hintloop play`` would have made it."""

from __future__ import annotations

from pathlib import Path

import pytest

from hintloop.cli.config import load_config
from hintloop.cli.main import run_command
from hintloop.cli.runfolder import RunFolder, read_lines


def setup(run: Path, *options: str) -> int:
    return run_command(["setup", str(run), "--preset", "smoke", *options])


def test_a_new_run_has_its_settings_and_its_model(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    assert setup(folder.path, "--set", "learner.steps=3") == 0
    assert load_config(file=folder.config) == load_config(preset="smoke", assignments=["learner.steps=3"])
    assert (folder.student / "model.safetensors").is_file()
    assert len(read_lines(folder.plays)) == 1


def test_a_folder_with_mount_points_is_taken(tmp_path: Path) -> None:
    (tmp_path / "journal").mkdir()
    assert setup(tmp_path) == 0
    assert RunFolder(tmp_path).is_run()


def test_a_run_goes_on_with_its_own_settings_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    setup(tmp_path, "--set", "learner.steps=3")
    before = RunFolder(tmp_path).config.read_text()
    capsys.readouterr()
    assert setup(tmp_path, "--set", "learner.steps=9") == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{tmp_path} holds a run, which goes on",
        "not taken over: learner.steps=9; the run has 3",
    ]
    assert RunFolder(tmp_path).config.read_text() == before
    assert len(read_lines(RunFolder(tmp_path).plays)) == 2


def test_a_model_that_is_not_there_makes_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert setup(tmp_path / "run", "--set", "student.model=nothing") == 2
    assert "no model 'nothing'" in capsys.readouterr().err
    assert not RunFolder(tmp_path / "run").is_run()
