"""Which part may know which: the rules hold, and a broken one is noticed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

FOLDERS = ("agent", "cli", "containers", "envs", "learner", "replay", "rollout")
_LINT = "from importlinter.cli import lint_imports_command; lint_imports_command()"


@pytest.fixture
def tree(repository: Path, tmp_path: Path) -> Path:
    """A copy of the modules, importable as ``hintloop`` through the link in ``.ns``."""
    for folder in FOLDERS:
        shutil.copytree(
            repository / folder, tmp_path / folder, ignore=lambda _, names: _all_but_modules(names)
        )
    shutil.copyfile(repository / "pyproject.toml", tmp_path / "pyproject.toml")
    (tmp_path / ".ns").mkdir()
    (tmp_path / ".ns" / "hintloop").symlink_to("..")
    return tmp_path


def _all_but_modules(names: list[str]) -> list[str]:
    return [name for name in names if "." in name and not name.endswith(".py")]


def _lint(tree: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", _LINT, "--no-logo", "--no-cache"]
    return subprocess.run(
        command,
        cwd=tree,
        env=os.environ | {"PYTHONPATH": ".ns"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_import_rules_hold(tree: Path) -> None:
    linted = _lint(tree)
    assert linted.returncode == 0, linted.stdout + linted.stderr
    assert "0 broken" in linted.stdout


@pytest.mark.parametrize(
    ("part", "forbidden"),
    [
        ("learner", "rollout"),
        ("learner", "agent"),
        ("learner", "envs"),
        ("rollout", "learner"),
        ("rollout", "cli"),
        ("agent", "rollout"),
        ("envs", "replay"),
        ("replay", "envs"),
    ],
)
def test_a_forbidden_import_is_noticed(tree: Path, part: str, forbidden: str) -> None:
    (tree / part / "extra.py").write_text(f"import hintloop.{forbidden}\n")
    linted = _lint(tree)
    assert linted.returncode == 1, linted.stdout + linted.stderr
    assert f"hintloop.{part}.extra -> hintloop.{forbidden}" in linted.stdout
