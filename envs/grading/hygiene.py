"""What a hand-in must not bring along: files that Python or pytest would run or obey before the first test.

The graded sandbox is fresh, so what is refused here simply stays as the task has it.
"""

from __future__ import annotations

import configparser
import tomllib
from collections.abc import Callable, Collection, Mapping
from typing import Any

_STARTUP = {
    "conftest.py",
    "sitecustomize.py",
    "usercustomize.py",
    "pytest.ini",
    ".pytest.ini",
    "pytest.toml",
    ".pytest.toml",
}
_SHADOWING = {"pytest", "_pytest", "pluggy", "unittest"}
"""Modules of a test run that a file of the same name in the working directory would replace."""
_SETTINGS = {"setup.cfg", "tox.ini"}
_COMPILED = (".pth", ".pyc", ".pyo")
_PLUGINS = (".dist-info", ".egg-info")


def refused(
    files: Mapping[str, str | None], original: Callable[[str], str | None], declared: Collection[str]
) -> set[str]:
    """The paths of ``files`` that must stay as they are.

    ``original`` gives the task's own content of a path, None when it has no such file. What the task itself
    declares as an artifact, by exactly that path, is never refused.
    """
    return {
        path for path, text in files.items() if path not in declared and _is_planted(path, text, original)
    }


def _is_planted(path: str, text: str | None, original: Callable[[str], str | None]) -> bool:
    *folders, name = path.split("/")
    if name in _STARTUP:
        return text != original(path)
    if name.endswith(_COMPILED) or any(folder.endswith(_PLUGINS) for folder in folders):
        return text != original(path)
    if "__pycache__" in folders:
        return True
    if (folders or [name.removesuffix(".py")])[0] in _SHADOWING:
        return original(path) is None
    if name in _SETTINGS or name == "pyproject.toml":
        return bool(_pytest_settings(name, text) != _pytest_settings(name, original(path)))
    return False


def _pytest_settings(name: str, text: str | None) -> Any:
    """What a file tells pytest; the text itself when it cannot be parsed."""
    try:
        if name == "pyproject.toml":
            return tomllib.loads(text or "").get("tool", {}).get("pytest", {})
        parser = configparser.RawConfigParser()
        parser.read_string(text or "")
        return {section: dict(parser[section]) for section in ("tool:pytest", "pytest") if section in parser}
    except (tomllib.TOMLDecodeError, configparser.Error, AttributeError, ValueError):
        return text
