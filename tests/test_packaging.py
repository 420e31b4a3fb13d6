"""The wheel holds every module of the source tree, all of it under one name."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

SKELETONS = "envs/skeletons/"
"""Tasks to start from: data, with Python files among them."""
FOLDERS = ("agent", "cli", "containers", "envs", "learner", "replay", "rollout")


def _sources(repository: Path) -> list[str]:
    """Files of the tree, those included that are new and not ignored."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    asked = subprocess.run(command, cwd=repository, capture_output=True, text=True, timeout=60, check=False)
    if asked.returncode:
        pytest.skip(f"not a git checkout: {asked.stderr.strip()}")
    return [name for name in asked.stdout.splitlines() if (repository / name).is_file()]


@pytest.fixture(scope="module")
def sources(repository: Path) -> list[str]:
    return _sources(repository)


@pytest.fixture(scope="module")
def wheel_names(repository: Path, sources: list[str], tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    tree = tmp_path_factory.mktemp("tree")
    for name in sources:
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(repository / name, tree / name)
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tree / "dist")]
    built = subprocess.run(command, cwd=tree, capture_output=True, text=True, timeout=120, check=False)
    assert built.returncode == 0, built.stderr
    (wheel,) = (tree / "dist").glob("*.whl")
    return zipfile.ZipFile(wheel).namelist()


def test_wheel_holds_exactly_the_modules_of_the_tree(sources: list[str], wheel_names: list[str]) -> None:
    expected = {f"hintloop/{name}" for name in _modules(sources)}
    assert {name for name in wheel_names if name.endswith(".py") and SKELETONS not in name} == expected


def test_wheel_holds_the_data_files_of_the_tree(sources: list[str], wheel_names: list[str]) -> None:
    kinds = ("py.typed", ".toml", ".yaml", ".json", ".safetensors", ".jinja", ".html", ".css", ".js", ".svg")
    expected = {f"hintloop/{name}" for name in _ours(sources) if name.endswith(kinds) or SKELETONS in name}
    assert expected
    assert expected <= set(wheel_names)


def test_only_top_level_name_of_the_wheel_is_hintloop(wheel_names: list[str]) -> None:
    tops = {name.split("/")[0] for name in wheel_names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"hintloop"}


def test_every_folder_with_modules_is_a_listed_package(repository: Path, sources: list[str]) -> None:
    listed = tomllib.loads((repository / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    folders = {str(Path(name).parent) for name in _modules(sources)}
    assert {f"hintloop.{folder.replace('/', '.')}" for folder in folders} == set(listed)


def test_every_folder_with_modules_has_an_init(sources: list[str]) -> None:
    modules = _modules(sources)
    assert {str(Path(name).parent / "__init__.py") for name in modules} <= set(modules)


def _ours(sources: list[str]) -> list[str]:
    """Those that belong into the wheel."""
    return [name for name in sources if name.split("/")[0] in FOLDERS and "/" in name]


def _modules(sources: list[str]) -> list[str]:
    return [name for name in _ours(sources) if name.endswith(".py") and not name.startswith(SKELETONS)]
