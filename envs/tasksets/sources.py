"""What the task sets made from published data share: where the data is, and a set that holds all its tasks.

Every such set has the splits ``train`` and ``heldout``; ``hintloop.envs.registry.is_held_out`` decides by the task
id alone. The data is widely published, so scores on either split say little about unseen tasks.
"""

from __future__ import annotations

import ast
import json
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from hintloop.envs.registry import split_by_id
from hintloop.envs.task import Task

HUB = "https://huggingface.co"
REACH_SECONDS = 5.0
"""For a first look whether the hub can be reached at all; its client tries for half a minute."""


class Collection:
    """A task set whose tasks are all there; see ``hintloop.envs.task.TaskSet``."""

    def __init__(self, name: str, description: str, tasks: Sequence[Task]):
        self.name = name
        self.description = description
        self._tasks = {task.task_id: task for task in tasks}

    def splits(self) -> dict[str, Sequence[str]]:
        """``train`` and ``heldout`` -> task ids, in the order of the data."""
        return split_by_id(list(self._tasks))

    def get(self, task_id: str) -> Task:
        """The task of an id. ``KeyError`` when there is no such task."""
        if task_id not in self._tasks:
            raise KeyError(f"the {self.name} set has no task {task_id!r}")
        return self._tasks[task_id]


def parse(source: str) -> ast.Module:
    """The tree of Python source from elsewhere, whose style is nobody's to warn of here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(source)


def checkout(variable: str, repository: str, needed: str) -> Path:
    """The folder that an environment variable names: a checkout that has ``needed``. ``ValueError`` says what to do."""
    folder = Path(os.environ.get(variable, "")).expanduser()
    if variable not in os.environ or not (folder / needed).is_dir():
        given = f"{folder} has no {needed}" if variable in os.environ else "it is not set"
        raise ValueError(f"set {variable} to a checkout of https://github.com/{repository} ({given})")
    return folder


def rows(variable: str, dataset: str, config: str) -> list[dict[str, Any]]:
    """Rows of a data set: of the JSONL file (or the folder's ``*.jsonl``) that the variable names, else of the hub.

    ``ValueError`` says what to do when there are none.
    """
    if variable in os.environ:
        path = Path(os.environ[variable]).expanduser()
        found = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
        if len(found) != 1 or not found[0].is_file():
            raise ValueError(f"{variable} must name a JSONL file of {dataset}, or a folder with one: {path}")
        with found[0].open(encoding="utf-8") as file:
            return [json.loads(line) for line in file if line.strip()]
    try:
        from datasets import load_dataset

        if os.environ.get("HF_HUB_OFFLINE", "0") == "0":
            urlopen(os.environ.get("HF_ENDPOINT", HUB), timeout=REACH_SECONDS).close()
        return [dict(row) for split in load_dataset(dataset, config).values() for row in split]
    except (ImportError, OSError, ValueError, RuntimeError) as error:
        advice = f"set {variable} to a JSONL file of {dataset}"
        raise ValueError(f"{advice}; fetching it fails: {' '.join(str(error).split())[:200]}") from error
