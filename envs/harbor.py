"""Harbor task directories as tasks: ``instruction.md``, ``task.toml``, ``environment/``, ``tests/``, ``solution/``."""

from __future__ import annotations

import json
import posixpath
import re
import threading
import tomllib
from collections.abc import Sequence
from pathlib import Path

from hintloop.envs import dockerfile
from hintloop.envs.harbor_manifest import Artifact, Manifest, read_manifest
from hintloop.envs.registry import split_by_id
from hintloop.envs.sandbox import limits
from hintloop.envs.sandbox.base import SandboxSpec
from hintloop.envs.sandbox.layout import WORKSPACE, WORKSPACE_NAMES
from hintloop.envs.task import RepositoryTests, Script, Task

MANIFEST = "task.toml"
SPLITS = "splits.toml"
"""Beside the tasks of a folder, if there is one: split name -> names of task directories."""
_COMPOSE = ("docker-compose.yaml", "docker-compose.yml", "compose.yaml", "compose.yml")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_SOLUTION_SECONDS = 600.0


def load_task(folder: Path, *, task_id: str) -> Task:
    """The task in a directory. ``ValueError`` in one line for one that is incomplete or asks for what is not here."""
    try:
        return _load_task(folder, task_id)
    except FileNotFoundError as error:
        raise ValueError(f"task {folder.name}: there is no {Path(str(error.filename)).name}") from None
    except (ValueError, UnicodeDecodeError) as error:
        raise ValueError(f"task {folder.name}: {error}") from None


def load_taskset_folder(path: Path) -> FolderTasks:
    """The set of a folder of task directories, or of one such directory, named like the folder. ``ValueError``."""
    path = path.resolve()
    if (path / MANIFEST).is_file():
        return FolderTasks(path.name, {path.name: path}, {})
    found = {each.name: each for each in sorted(path.iterdir()) if (each / MANIFEST).is_file()}
    odd = [name for name in (path.name, *found) if not _NAME.fullmatch(name)]
    if odd:
        raise ValueError(f"a task's name has letters, digits, '.', '_' and '-' only, not {odd[0]!r}")
    if not found:
        raise ValueError(f"{path.name} holds no task: neither {MANIFEST} nor folders that have one")
    return FolderTasks(path.name, found, _read_splits(path / SPLITS, found))


class FolderTasks:
    """The tasks of a folder; each is read when it is first asked for. Threads may share it."""

    def __init__(self, name: str, folders: dict[str, Path], splits: dict[str, list[str]]):
        """``folders``: name of a task -> its directory; ``splits``: by these names, or none for ``split_by_id``."""
        self.name = name
        self.description = f"{len(folders)} task directories"
        self._folders = {f"{name}/{task}": folder for task, folder in folders.items()}
        self._splits = {split: [f"{name}/{task}" for task in tasks] for split, tasks in splits.items()}
        self._loaded: dict[str, Task] = {}
        self._lock = threading.Lock()

    def splits(self) -> dict[str, Sequence[str]]:
        """As ``splits.toml`` says, else ``train`` and ``heldout`` by each task's own id."""
        return dict(self._splits) if self._splits else split_by_id(list(self._folders))

    def get(self, task_id: str) -> Task:
        """The task. ``KeyError`` when there is none of that id, ``ValueError`` when it cannot be used."""
        if task_id not in self._folders:
            raise KeyError(f"the folder {self.name!r} has no such task")
        with self._lock:
            if task_id not in self._loaded:
                self._loaded[task_id] = load_task(self._folders[task_id], task_id=task_id)
            return self._loaded[task_id]


def _read_splits(path: Path, known: dict[str, Path]) -> dict[str, list[str]]:
    if not path.exists():
        return {}
    try:
        splits = tomllib.loads(path.read_text("utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path.name}: {error}") from None
    seen: set[str] = set()
    for split, tasks in splits.items():
        if not isinstance(tasks, list):
            raise ValueError(f"{path.name}: {split} must be a list of tasks")
        for task in tasks:
            if task not in known:
                raise ValueError(f"{path.name}: {split} names {task!r}, and there is no such task")
            if task in seen:
                raise ValueError(f"{path.name}: {task!r} is named twice")
            seen.add(task)
    if missing := sorted(known.keys() - seen):
        raise ValueError(f"{path.name}: no split has {missing[0]!r}; it has to name every task")
    return splits


def _load_task(folder: Path, task_id: str) -> Task:
    manifest = read_manifest(folder / MANIFEST)
    instruction = (folder / "instruction.md").read_text("utf-8").strip()
    workdir, files, spec = _environment(folder / "environment", manifest)
    verifier, own = manifest.verifier, manifest.hintloop
    script = _script(folder / "tests", "test.sh", "/tests", verifier.timeout_sec, verifier.env)
    return Task(
        task_id,
        instruction,
        files,
        RepositoryTests(script, _artifacts(manifest, workdir), own.visible_tests),
        _solution(folder / "solution", manifest),
        max_turns=own.max_turns,
        sandbox=spec,
        metadata=_metadata(manifest),
    )


def _environment(folder: Path, manifest: Manifest) -> tuple[str | None, dict[str, str], SandboxSpec]:
    """Working directory (None: the image's own), the files in it, and what the sandbox is to be."""
    table = manifest.environment
    for name in _COMPOSE:
        if (folder / name).exists():
            raise ValueError(f"environment/{name}: several containers are not supported")
    plain = None
    if table.docker_image is None:
        plain = dockerfile.read_plain(folder, table.workdir)
    if plain is None and table.workdir is not None:
        raise ValueError(f"{MANIFEST}: environment.workdir is not supported for an image; its WORKDIR counts")
    built = plain is None and table.docker_image is None
    spec = SandboxSpec(
        image=dockerfile.image_tag(folder) if built else table.docker_image,
        context=str(folder) if built else None,
        env={**(plain.env if plain else {}), **table.env},
        memory=limits.MEMORY if table.memory_mb is None else table.memory_mb * limits.MiB,
        disk=limits.DISK if table.storage_mb is None else table.storage_mb * limits.MiB,
        cpus=1.0 if table.cpus is None else table.cpus,
    )
    return (plain.workdir, plain.files, spec) if plain else (None, {}, spec)


def _script(folder: Path, name: str, place: str, timeout: float, env: dict[str, str]) -> Script:
    """The program ``name`` of a folder that is to be found at ``place``."""
    text = dockerfile.read_text(folder / name)
    files = {
        path.relative_to(folder).as_posix(): dockerfile.read_text(path)
        for path in dockerfile.files_below(folder)
    }
    command = f"{place}/{name}" if text.startswith("#!") else f"bash {place}/{name}"
    return Script(files, command, timeout, dict(env))


def _solution(folder: Path, manifest: Manifest) -> dict[str, str] | Script:
    """Empty when the task has none."""
    if not folder.exists():
        return {}
    seconds = manifest.agent.timeout_sec or _SOLUTION_SECONDS
    return _script(folder, "solve.sh", "/solution", seconds, manifest.solution.env)


def _artifacts(manifest: Manifest, workdir: str | None) -> tuple[str, ...]:
    found = []
    for artifact in manifest.artifacts:
        path = artifact.source if isinstance(artifact, Artifact) else artifact
        for place in (workdir,) if workdir is not None else (WORKSPACE, *WORKSPACE_NAMES):
            path = posixpath.relpath(path, place) if f"{path}/".startswith(f"{place}/") else path
        path = posixpath.normpath(path)
        if path.startswith(("/", "..")):
            raise ValueError(f"{MANIFEST}: artifacts: {path!r} is not in the working directory")
        found.append(path)
    return tuple(found)


def _metadata(manifest: Manifest) -> dict[str, str]:
    """What has no place of its own, as text; the free table with each value that is no text as JSON."""
    network = manifest.environment.network_mode or "public"
    found = {
        "name": manifest.task.name,
        "version": manifest.task.version,
        "network": f"asks for {network}, gets none",
    }
    if network == "no-network":
        found["network"] = "none"
    if manifest.agent.timeout_sec is not None:
        found["agent_timeout_sec"] = f"{manifest.agent.timeout_sec:g}"
    free = {name: value for name, value in manifest.metadata.items() if name != "hintloop"}
    found |= {
        name: value if isinstance(value, str) else json.dumps(value, default=str)
        for name, value in free.items()
    }
    return {name: value for name, value in found.items() if value}
