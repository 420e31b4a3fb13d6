"""Checkpoints: everything that an exact resume needs, there whole or not at all.

``<folder>/v000042/`` holds ``model/`` (a loadable model folder), ``published/`` (another one, where other weights
than those are published), ``adapter.safetensors`` (where adapters are trained), ``teacher.safetensors`` (the moving
average, if there is one), ``optimizer.pt`` and ``state.json``. Where adapters are trained, a model folder holds them
as well, below ``adapter/`` and as PEFT does, for engines that take them in place of the whole model.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from hintloop.learner.config import LearnerConfig
from hintloop.learner.lora import plain_tensors, save_adapter
from hintloop.learner.models import Weights, hold, holding, load_model, no_progress_bar, trained_weights
from hintloop.replay.storage import sync_folder, temporary_path

_NAME = re.compile(r"v(\d{6,})")
_WEIGHTS = ("*.safetensors", "*.bin", "*.index.json", "config.json", "generation_config.json")
KEPT = 2


@dataclass(frozen=True, slots=True)
class State:
    """Where a learner stands. JSON-able."""

    step: int
    """Optimizer steps done."""
    version: int
    """Version under which these weights are published."""
    position: dict[str, Any] | None
    """Of the ``GroupSource``; None at the beginning."""
    elapsed_s: float
    """Wall time spent so far, over all restarts."""
    metadata: dict[str, Any]
    """What is published with the version."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint on disk."""

    folder: Path
    state: State

    @property
    def model(self) -> Path:
        """The folder of the model, as it would have been without adapters."""
        return self.folder / "model"

    @property
    def published(self) -> Path:
        """The folder of the model that is published."""
        other = self.folder / "published"
        return other if other.exists() else self.model

    def load(self, student: Path, config: LearnerConfig) -> Any:
        """The model that training goes on with; ``student`` is the folder that it began with."""
        if not config.lora_rank:
            return load_model(self.model)
        model = load_model(student, config)
        hold(model, load_file(self.folder / "adapter.safetensors"))
        return model

    def restore(self, optimizer: tuple[torch.optim.Optimizer, Any], teacher: Weights | None) -> None:
        """Load optimizer, scheduler, random state and, when both exist, the teacher's weights."""
        saved = torch.load(self.folder / "optimizer.pt", weights_only=True)
        optimizer[0].load_state_dict(saved["optimizer"])
        optimizer[1].load_state_dict(saved["scheduler"])
        torch.set_rng_state(saved["random"])
        if teacher is not None and (path := self.folder / "teacher.safetensors").exists():
            for name, value in load_file(path).items():
                teacher[name].copy_(value)


def newest(folder: Path) -> Checkpoint | None:
    """The newest checkpoint, or None."""
    found = _versions(folder)
    if not found:
        return None
    path = folder / _name(found[-1])
    return Checkpoint(path, State(**json.loads((path / "state.json").read_text())))


def save(
    folder: Path,
    state: State,
    *,
    model: Any,
    published: Weights | None,
    student: Path,
    optimizer: tuple[torch.optim.Optimizer, Any],
    teacher: Weights | None,
    adapters: bool,
) -> Checkpoint:
    """Write a checkpoint and then remove all but the newest ``KEPT``.

    ``published`` are published in place of the weights of ``model``, if given; ``adapters``: they are what is
    trained. ``student`` is the folder the model came from; what is neither weights nor config there, such as the
    tokenizer, goes along. ``OSError`` when the disk fails, and then the save may be repeated.
    """
    target = folder / _name(state.version)
    folder.mkdir(parents=True, exist_ok=True)
    for leftover in folder.glob(".*.tmp"):
        shutil.rmtree(leftover)
    temporary = temporary_path(target)
    temporary.mkdir()
    try:
        _save_model(model, student, temporary / "model", adapters=adapters)
        if published is not None:
            with holding(model, published):
                _save_model(model, student, temporary / "published", adapters=adapters)
        if adapters:
            save_file(trained_weights(model), temporary / "adapter.safetensors")
        if teacher is not None:
            save_file(teacher, temporary / "teacher.safetensors")
    except SafetensorError as error:  # all that it says of a full disk
        raise OSError(f"cannot write the checkpoint {target}: {error}") from error
    parts = {"optimizer": optimizer[0].state_dict(), "scheduler": optimizer[1].state_dict()}
    _save_state({**parts, "random": torch.get_rng_state()}, temporary / "optimizer.pt")
    (temporary / "state.json").write_text(json.dumps(asdict(state), allow_nan=False))
    _sync(temporary)
    os.replace(temporary, target)
    sync_folder(folder)
    for old in _versions(folder)[:-KEPT]:
        shutil.rmtree(folder / _name(old))
    return Checkpoint(target, state)


def _save_model(model: Any, student: Path, folder: Path, *, adapters: bool) -> None:
    with no_progress_bar():
        model.save_pretrained(folder, state_dict=plain_tensors(model))
    if adapters:
        save_adapter(model, folder / "adapter")
    for path in sorted(student.iterdir()):
        if path.is_file() and not any(path.match(pattern) for pattern in _WEIGHTS):
            shutil.copy2(path, folder / path.name)


def _save_state(state: dict[str, Any], path: Path) -> None:
    """``torch.save``; where the disk fails, an error that says so, which torch hides behind one of its own."""
    with path.open("wb") as file:
        try:
            torch.save(state, file)
        except RuntimeError as error:
            if isinstance(error.__context__, OSError):
                raise OSError(error.__context__.errno, error.__context__.strerror, str(path)) from error
            raise


def _sync(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        else:
            sync_folder(path)
    sync_folder(folder)


def _versions(folder: Path) -> list[int]:
    if not folder.exists():
        return []
    return sorted(int(match[1]) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name)))


def _name(version: int) -> str:
    return f"v{version:06d}"
