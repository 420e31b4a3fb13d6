"""Finds the model of a run and puts it, whole, into the run folder.

The learner and the engine then need nothing from elsewhere: the folder holds weights, tokenizer, and
``hintloop.json`` with the family of the chat template and the prompt style.
"""

from __future__ import annotations

import json
import os
import shutil
from importlib import resources
from pathlib import Path
from typing import Any

from hintloop.cli.config import StudentSection
from hintloop.cli.errors import UserError

BUNDLED = ("student-tiny",)
SETTINGS_FILE = "hintloop.json"
_WANTED = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model")
"""Files of a model that are taken; never a pickle, never code."""


def prepare_student(student: StudentSection, target: Path) -> Path:
    """Make ``target``, a model folder that loads offline, unless it is there; gives ``target``.

    It is there whole or not at all. ``UserError`` when there is no such model, it has no weights as
    safetensors or no tokenizer, or its chat template is not known.
    """
    if target.exists():
        return target
    part = target.with_name(f".{target.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    try:
        _fill(part, student)
        if student.model not in BUNDLED:
            _check(part, student.model)
        part.rename(target)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return target


def find_model(name: str) -> Path:
    """The folder of a bundled model, a folder's own path, or a downloaded snapshot. ``UserError``."""
    if name in BUNDLED:
        folder = Path(str(resources.files("hintloop.agent") / "student" / name))
        if not folder.is_dir():
            raise UserError(f"{name} is missing from this installation; make it with: hintloop student build")
        return folder
    if Path(name).is_dir():
        return Path(name)
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise UserError(
            f"no model {name!r}: give {', '.join(BUNDLED)}, a model folder or owner/name on the hub"
        )
    return _download(name)


def _download(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    try:
        return Path(snapshot_download(name, allow_patterns=list(_WANTED)))
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise UserError(f"cannot get model {name!r} from the hub: {error}") from error


def _fill(part: Path, student: StudentSection) -> None:
    source = find_model(student.model)
    files = sorted(path for pattern in _WANTED for path in source.glob(pattern) if path.is_file())
    if not any(path.suffix == ".safetensors" for path in files):
        raise UserError(f"model {student.model} has no weights (*.safetensors)")
    for path in files:
        _link_or_copy(path.resolve(), part / path.name)
    settings = _by_name(student.model) | _settings(part / SETTINGS_FILE) | _chosen(student)
    (part / SETTINGS_FILE).unlink(missing_ok=True)  # it may be a link to the original
    (part / SETTINGS_FILE).write_text(json.dumps(settings, indent=1) + "\n")


def _link_or_copy(source: Path, target: Path) -> None:
    """A hard link costs nothing, but works on one file system only."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def _settings(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text())
    except ValueError as error:
        raise UserError(f"{path.name} of the model is not JSON: {error}") from error
    return found if isinstance(found, dict) else {}


def _chosen(student: StudentSection) -> dict[str, str]:
    chosen = {"renderer": student.renderer, "prompt": student.prompt}
    return {key: value for key, value in chosen.items() if value not in (None, "auto")}


def _by_name(name: str) -> dict[str, str]:
    """What a name on the hub says of the chat template; the copy no longer has that name."""
    if name in BUNDLED or Path(name).is_dir():
        return {}
    from renderers.base import MODEL_RENDERER_MAP

    return {"renderer": str(MODEL_RENDERER_MAP[name])} if name in MODEL_RENDERER_MAP else {}


def _check(folder: Path, name: str) -> None:
    """Load tokenizer and renderer once, so that a bad model ends the run before it begins."""
    from hintloop.agent.policy import load_renderer

    try:
        load_renderer(folder)
    except ValueError as error:
        raise UserError(f"model {name}: {str(error).replace(str(folder), name)}") from error
