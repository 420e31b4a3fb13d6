"""``python containers/pins.py REQUIREMENT... > FILE``: exact versions of these packages and of all that they need.

They are those that the Python that runs this has. ``.[EXTRA,...]`` stands for what the project itself needs.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

PROJECT = Path(__file__).parent.parent / "pyproject.toml"
_REQUIREMENT = re.compile(r"\s*([A-Za-z0-9._-]+)\s*(?:\[([^]]*)\])?")
_EXTRA = re.compile(r"extra\s*==\s*['\"]([^'\"]+)['\"]")
Named = tuple[str, frozenset[str]]
"""A package and the extras that are wanted of it."""


def main(requirements: list[str]) -> None:
    """Print the pins, one a line, sorted."""
    pins: dict[str, str] = {}
    seen: set[Named] = set()
    waiting = [parse(text) for text in requirements]
    while waiting:
        named = waiting.pop()
        if named in seen:
            continue
        seen.add(named)
        if named[0] == ".":
            waiting += of_project(named[1])
            continue
        try:
            found = distribution(named[0])
        except PackageNotFoundError:  # for another system, or another Python
            continue
        pins[named[0]] = found.version.partition("+")[0]  # what follows names a build, not a release
        waiting += wanted(found.requires or (), named[1])
    markers = own_markers()
    for name in sorted(pins):
        print(f"{name}=={pins[name]}{markers.get(name, '')}")


def parse(text: str) -> Named:
    """The name as indices spell it, and the extras."""
    found = _REQUIREMENT.match(text)
    if found is None:
        sys.exit(f"{text!r} is no requirement")
    extras = frozenset(extra.strip() for extra in (found[2] or "").split(",") if extra.strip())
    return re.sub(r"[-_.]+", "-", found[1]).lower() if found[1] != "." else ".", extras


def wanted(lines: list[str] | tuple[()], extras: frozenset[str]) -> Iterator[Named]:
    """What a package needs; of what depends on the machine, all."""
    for line in lines:
        requirement, _, marker = line.partition(";")
        asked = set(_EXTRA.findall(marker))
        if not asked or asked & extras:
            yield parse(requirement)


def of_project(extras: frozenset[str]) -> list[Named]:
    """What the project needs with these extras."""
    project = tomllib.loads(PROJECT.read_text("utf-8"))["project"]
    lists = [project["dependencies"], *(project["optional-dependencies"][extra] for extra in extras)]
    return [parse(line) for lines in lists for line in lines]


def own_markers() -> dict[str, str]:
    """Of each package that the project wants on some machines only: ``; `` and its marker."""
    extras = tomllib.loads(PROJECT.read_text("utf-8"))["project"]["optional-dependencies"]
    return {
        parse(line)[0]: line[line.index(";") :] for lines in extras.values() for line in lines if ";" in line
    }


if __name__ == "__main__":
    main(sys.argv[1:])
