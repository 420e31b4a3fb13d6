"""Dockerfiles that only copy files: what they make needs no image, only the files in a working directory."""

from __future__ import annotations

import hashlib
import json
import posixpath
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from hintloop.envs.sandbox.layout import WORKSPACE, WORKSPACE_NAMES

_ARCHIVE = re.compile(r"\.(tar|tgz|tbz2?|txz|tar\.\w+)$")
_IMAGE = "hintloop-task"
MAX_FILE = 4 * 1024 * 1024
"""Bytes that one file of a task may have."""


@dataclass(frozen=True, slots=True)
class Plain:
    """What a Dockerfile without any program to run amounts to."""

    workdir: str
    files: dict[str, str]
    """Path in the working directory -> content."""
    env: dict[str, str]


def read_plain(folder: Path, workdir: str | None) -> Plain | None:
    """What ``folder/Dockerfile`` makes, if it has no more than FROM, WORKDIR, COPY, ADD and ENV.

    None when it needs an image: it runs something, takes from elsewhere, copies to places outside of the working
    directory, or that is no usual one. ``workdir`` is used instead of its last WORKDIR. ``ValueError`` for a file
    that is missing or too large.
    """
    if (folder / ".dockerignore").exists():
        return None
    place, num_from = "/", 0
    copied: dict[str, Path] = {}
    env: dict[str, str] = {}
    for name, rest in _instructions((folder / "Dockerfile").read_text("utf-8")):
        if "$" in rest:
            return None
        if name == "FROM":
            num_from += 1
        elif name == "WORKDIR":
            place = posixpath.join(place, rest.strip())
        elif name == "ENV":
            env |= _variables(rest)
        elif name in ("COPY", "ADD"):
            found = _copied(folder, rest, place, is_add=name == "ADD")
            if found is None:
                return None
            copied |= found
        else:
            return None
    place = posixpath.normpath(workdir or place)
    inside = all(path.startswith(f"{place}/") for path in copied)
    if num_from != 1 or place not in (WORKSPACE, *WORKSPACE_NAMES) or not inside:
        return None
    files = {path[len(place) + 1 :]: read_text(source) for path, source in copied.items()}
    return Plain(place, files, env)


def image_tag(folder: Path) -> str:
    """A name for the image of a folder with a Dockerfile, which another content would not have."""
    digest = hashlib.sha256()
    for path in files_below(folder):
        executable = path.stat().st_mode & 0o100 != 0
        digest.update(json.dumps([str(path.relative_to(folder)), executable]).encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return f"{_IMAGE}:{digest.hexdigest()[:24]}"


def files_below(folder: Path) -> list[Path]:
    """All regular files, sorted. ``ValueError`` for links, which might lead out of the task."""
    found = sorted(folder.rglob("*"))
    links = [path for path in found if path.is_symlink()]
    if links:
        raise ValueError(f"{folder.name}/{links[0].relative_to(folder)} is a link")
    return [path for path in found if path.is_file()]


def read_text(path: Path) -> str:
    """A file's content; bytes that are not UTF-8 become surrogate escapes. ``ValueError`` when it is too large."""
    if path.stat().st_size > MAX_FILE:
        raise ValueError(f"{path.name} has more than {MAX_FILE} bytes")
    return path.read_bytes().decode("utf-8", "surrogateescape")


def _instructions(text: str) -> list[tuple[str, str]]:
    """Name in capitals and the rest, for every instruction; comments are left out, broken lines joined."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\[ \t]*\n", " ", "\n".join(lines))
    parts = [line.strip().partition(" ") for line in joined.split("\n") if line.strip()]
    return [(name.upper(), rest) for name, _, rest in parts]


def _variables(rest: str) -> dict[str, str]:
    words = shlex.split(rest)
    if words and "=" not in words[0]:
        return {words[0]: rest.strip().partition(" ")[2].strip()}
    return {word.partition("=")[0]: word.partition("=")[2] for word in words}


def _copied(folder: Path, rest: str, place: str, *, is_add: bool) -> dict[str, Path] | None:
    """Absolute target -> source of every file that one instruction copies; None when it does more than that."""
    words = [str(word) for word in json.loads(rest)] if rest.lstrip().startswith("[") else shlex.split(rest)
    while words and words[0].startswith("--"):
        if not words.pop(0).startswith(("--chown=", "--chmod=")):
            return None
    if len(words) < 2:
        raise ValueError(f"Dockerfile: nothing to copy in {rest!r}")
    *sources, target = words
    if any("://" in source or "**" in source or source.startswith("git@") for source in sources):
        return None
    found: dict[str, Path] = {}
    for source in sources:
        matches = _matches(folder, source)
        is_folder = target.endswith(("/", "/.")) or target == "." or len(sources) + len(matches) > 2
        for match in matches:
            if is_add and _ARCHIVE.search(match.name):
                return None
            if match.is_dir():
                below = {str(path.relative_to(match)): path for path in files_below(match)}
            else:
                below = {match.name if is_folder else "": match}
            for name, path in below.items():
                found[posixpath.normpath(posixpath.join(place, target, name))] = path
    return found


def _matches(folder: Path, source: str) -> list[Path]:
    """The files and folders that a source of COPY names, all of them in ``folder``."""
    source = posixpath.normpath(source).lstrip("/")
    if source == "." or any(letter in source for letter in "*?["):
        found = [folder] if source == "." else sorted(folder.glob(source))
    else:
        found = [folder / source]
    root = folder.resolve()
    if not found or not all(path.exists() and path.resolve().is_relative_to(root) for path in found):
        raise ValueError(f"Dockerfile: there is no {source!r} beside it")
    return found
