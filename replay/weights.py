"""The weight store: immutable versions ``v000042/`` and a pointer to the newest.

A version is a commit: its ``manifest.json`` is written after everything else and names every file with its
size and SHA-256, so a version without one does not exist. There is one publisher at a time; readers are many.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

import structlog

from hintloop.replay.storage import Store, read_chunks, sweep_temporaries, sync_folder, temporary_path

MANIFEST = "manifest.json"
LATEST = "LATEST"

_VERSION = re.compile(r"v(\d{6,})")

_log = structlog.get_logger(__name__)


class DigestMismatch(Exception):
    """A file of a version is not what was published."""


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file of a version."""

    sha256: str
    """Lower-case hexadecimal."""
    size: int
    """Bytes."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a version consists of. ``files`` has relative POSIX paths; ``metadata`` is JSON-able."""

    version: int
    files: dict[str, FileEntry]
    metadata: dict[str, Any]
    created_at: float
    """Unix time, seconds."""

    def to_json(self) -> bytes:
        """The content of ``manifest.json``."""
        return json.dumps(asdict(self), indent=1, sort_keys=True, allow_nan=False).encode()

    @staticmethod
    def from_json(data: bytes) -> Manifest:
        """The inverse of ``to_json``. ``ValueError`` for damage or a file outside the folder."""
        try:
            raw = json.loads(data)
            files = {
                str(name): FileEntry(str(e["sha256"]), int(e["size"])) for name, e in raw["files"].items()
            }
            manifest = Manifest(int(raw["version"]), files, dict(raw["metadata"]), float(raw["created_at"]))
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not a manifest: {error!r}") from error
        for name in files:
            _check_name(name)
        return manifest


class WeightStore:
    """A folder of weight versions at ``uri``: any fsspec URI or a plain path."""

    def __init__(self, uri: str | Path) -> None:
        self._store = Store(uri)
        self.uri = self._store.uri

    def publish(self, version: int, folder: Path, *, metadata: dict[str, Any]) -> Manifest:
        """Copy all files below ``folder`` into a new version and make it the latest, unless a higher one is.

        The same version with the same files again changes nothing, and gives the first manifest; what a
        crashed publish left is replaced. ``ValueError`` when the version holds other files, when ``folder``
        holds none or when ``metadata`` has a NaN, ``TypeError`` when it is not JSON; ``OSError`` when the
        storage fails, and then the publish may be repeated.
        """
        metadata = json.loads(json.dumps(metadata, allow_nan=False))
        paths = _files_below(folder)
        if version < 0 or not paths:
            raise ValueError(f"cannot publish version {version} of {len(paths)} files from {folder}")
        if self._is_committed(version):
            manifest = self._published_before(version, paths)
        else:
            manifest = self._commit(version, paths, metadata)
        self._store.sweep(LATEST)
        if version >= (self._pointer() or 0):
            self._store.replace(LATEST, f"{version_name(version)}\n".encode())
        return manifest

    def latest(self) -> Manifest | None:
        """The newest version, or None before the first. Without a usable pointer, the highest committed."""
        pointed = self._pointer()
        if pointed is not None and (manifest := self._usable(pointed)):
            return manifest
        candidates = (self._usable(version) for version in reversed(self.versions()))
        return next((manifest for manifest in candidates if manifest), None)

    def manifest(self, version: int) -> Manifest:
        """``FileNotFoundError`` when there is no such version, ``ValueError`` when it is damaged."""
        name = f"{version_name(version)}/{MANIFEST}"
        try:
            data = self._store.read(name)
        except FileNotFoundError:
            raise FileNotFoundError(f"{self.uri} has no weights of version {version}") from None
        try:
            manifest = Manifest.from_json(data)
        except ValueError as error:
            raise ValueError(f"{self.uri}: {name} is damaged: {error}") from error
        if manifest.version != version:
            raise ValueError(f"{self.uri}: {name} is of version {manifest.version}")
        return manifest

    def versions(self) -> list[int]:
        """The committed versions, ascending."""
        return [version for version in self._folders() if self._is_committed(version)]

    def fetch(self, version: int, cache: Path, *, under: str = "") -> Path:
        """A local folder ``cache/v000042`` that holds exactly the published files and the manifest.

        With ``under``, such as ``adapter/``, it is those whose names begin so, and a manifest of these; a cache is
        for one choice of files. Every digest is checked before the folder appears under that name. A folder that
        is there already is used again when its manifest names the same files, and replaced otherwise.
        ``DigestMismatch`` when the store holds a bad file; ``ValueError`` when there is none below ``under``;
        errors of ``manifest``.
        """
        manifest = _part(self.manifest(version), under)
        target = cache / version_name(version)
        if not _holds(target, manifest):
            sweep_temporaries(cache, target.name)
            temporary = temporary_path(target)
            try:
                self._download(manifest, temporary)
                _install(temporary, target, manifest)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
        return target

    def prune(self, keep: int) -> list[int]:
        """Delete all but the newest ``keep`` versions, never the latest; gives the deleted ones, ascending.

        What a crash left of older versions goes too. Whoever is fetching a deleted version gets an error.
        """
        if keep < 1:
            raise ValueError(f"keep must be at least 1, not {keep}")
        committed = self.versions()
        latest = self.latest()
        kept = {*committed[-keep:], *([latest.version] if latest else [])}
        doomed = [
            version for version in self._folders() if version < max(kept, default=0) and version not in kept
        ]
        for version in doomed:
            self._store.remove(
                f"{version_name(version)}/{MANIFEST}"
            )  # uncommitted first: never half a version
            self._store.remove(version_name(version))
        return [version for version in doomed if version in committed]

    def _commit(self, version: int, paths: dict[str, Path], metadata: dict[str, Any]) -> Manifest:
        folder = version_name(version)
        self._store.remove(folder)
        files: dict[str, FileEntry] = {}
        for name, path in paths.items():
            with path.open("rb") as source:
                counted = _Counted(read_chunks(source))
                self._store.write_chunks(f"{folder}/{name}", counted)
            files[name] = counted.entry()
        self._store.sync(folder)
        manifest = Manifest(version, files, metadata, time.time())
        self._store.create(f"{folder}/{MANIFEST}", manifest.to_json())
        return manifest

    def _published_before(self, version: int, paths: dict[str, Path]) -> Manifest:
        manifest = self.manifest(version)
        if manifest.files != {name: _entry(path) for name, path in paths.items()}:
            raise ValueError(f"{self.uri} has version {version} already, with other files")
        return manifest

    def _download(self, manifest: Manifest, folder: Path) -> None:
        for name, expected in manifest.files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                with self._store.open(f"{version_name(manifest.version)}/{name}") as source:
                    found = _write(path, read_chunks(source))
            except FileNotFoundError:
                if not self._is_committed(manifest.version):
                    raise  # pruned meanwhile
                raise DigestMismatch(f"{self.uri}: version {manifest.version} lacks {name}") from None
            if found != expected:
                raise DigestMismatch(
                    f"{self.uri}: {name} of version {manifest.version} is {found}, not {expected}"
                )
        _write(folder / MANIFEST, [manifest.to_json()])

    def _pointer(self) -> int | None:
        try:
            match = _VERSION.fullmatch(self._store.read(LATEST).decode(errors="replace").strip())
        except FileNotFoundError:
            return None
        return int(match[1]) if match else None

    def _usable(self, version: int) -> Manifest | None:
        try:
            return self.manifest(version)
        except (FileNotFoundError, ValueError) as error:
            _log.warning("weights.unusable_version", version=version, reason=str(error))
            return None

    def _folders(self) -> list[int]:
        return sorted(int(match[1]) for name in self._store.names() if (match := _VERSION.fullmatch(name)))

    def _is_committed(self, version: int) -> bool:
        return self._store.exists(f"{version_name(version)}/{MANIFEST}")


class _Counted:
    """Passes chunks on and keeps their size and digest."""

    def __init__(self, chunks: Iterable[bytes]) -> None:
        self._chunks = chunks
        self._digest = hashlib.sha256()
        self._size = 0

    def __iter__(self) -> Iterator[bytes]:
        for chunk in self._chunks:
            self._digest.update(chunk)
            self._size += len(chunk)
            yield chunk

    def entry(self) -> FileEntry:
        return FileEntry(self._digest.hexdigest(), self._size)


def version_name(version: int) -> str:
    """Folder name of a version."""
    return f"v{version:06d}"


def _part(manifest: Manifest, under: str) -> Manifest:
    files = {name: entry for name, entry in manifest.files.items() if name.startswith(under)}
    if not files:
        raise ValueError(f"version {manifest.version} has no files below {under}")
    return replace(manifest, files=files)


def _files_below(folder: Path) -> dict[str, Path]:
    paths = {
        path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()
    }
    for name in paths:
        _check_name(name)
    return paths


def _check_name(name: str) -> None:
    parts = PurePosixPath(name)
    if not name or name == MANIFEST or parts.is_absolute() or ".." in parts.parts or "\\" in name:
        raise ValueError(f"a version cannot hold a file named {name!r}")


def _entry(path: Path) -> FileEntry:
    with path.open("rb") as file:
        counted = _Counted(read_chunks(file))
        for _ in counted:
            pass
    return counted.entry()


def _write(path: Path, chunks: Iterable[bytes]) -> FileEntry:
    """Write and flush to the disk."""
    counted = _Counted(chunks)
    with path.open("xb") as file:
        file.writelines(counted)
        file.flush()
        os.fsync(file.fileno())
    return counted.entry()


def _holds(folder: Path, manifest: Manifest) -> bool:
    """Whether a cached folder is of this manifest; sizes are compared, digests were when it was made."""
    try:
        cached = Manifest.from_json((folder / MANIFEST).read_bytes())
        sizes = {name: (folder / name).stat().st_size for name in cached.files}
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return False
    return cached.files == manifest.files and sizes == {name: e.size for name, e in manifest.files.items()}


def _install(temporary: Path, target: Path, manifest: Manifest) -> None:
    """Rename into place; when another process was faster with the same files, use its folder."""
    if target.exists() and not _holds(target, manifest):
        outdated = temporary_path(target)
        with contextlib.suppress(FileNotFoundError):  # another process was replacing it too
            os.replace(target, outdated)
        shutil.rmtree(outdated, ignore_errors=True)
    try:
        os.replace(temporary, target)
    except OSError:
        if not _holds(target, manifest):
            raise
    sync_folder(target.parent)
