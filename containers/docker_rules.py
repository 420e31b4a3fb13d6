"""What an environment server may ask of a Docker engine, and nothing else: pure functions over one request.

Everything is allowed by name. A path, a parameter or a field that is not named here is refused, and what goes to the
engine is made anew of what was understood, so nothing travels that was not looked at.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit

OWNER = "hintloop.proxy"
"""Label of every container that is made through a proxy; its value is the proxy's name."""
MAX_BODY = 256 * 1024
"""Bytes of a request's body."""
IMAGES = ("hintloop-sandbox", "hintloop-sandbox:*", "hintloop-prepared:*")
"""Names of images that containers may be made of; ``*`` stands for anything."""
_TMPFS_FOLDER = re.compile(r"(/[A-Za-z0-9_-][A-Za-z0-9._-]*)+")
_TMPFS_OPTIONS = re.compile(r"[a-z0-9_=,]{1,200}")
_USER = re.compile(r"[1-9][0-9]{0,9}:[1-9][0-9]{0,9}")
_YES = ("1", "True", "true")
_UPGRADE = {"Connection": "Upgrade", "Upgrade": "tcp"}


class Refused(Exception):
    """The request is not let through; the text says why."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Whose containers they are, and what they may be made of and take."""

    owner: str
    """Value of the label ``OWNER``."""
    images: tuple[str, ...] = IMAGES
    runtimes: tuple[str, ...] = ("runc", "runsc")
    max_memory: int = 8 << 30
    """Bytes per container."""
    max_cpus: float = 4.0
    max_pids: int = 4096
    max_containers: int = 256
    """At the same time."""


@dataclass(frozen=True, slots=True)
class Request:
    """A request as it goes to the engine."""

    method: str
    path: str
    query: Mapping[str, str]
    body: bytes = b""
    container: str | None = None
    """Id of the container that it is about; whose that is has to be found out."""

    @property
    def target(self) -> str:
        """Path and query."""
        return f"{self.path}?{urlencode(self.query)}" if self.query else self.path

    @property
    def creates(self) -> bool:
        """Whether it makes a container."""
        return self.path.endswith("/containers/create")

    @property
    def attaches(self) -> bool:
        """Whether the connection becomes a container's input and output."""
        return self.path.endswith("/attach")

    @property
    def describes_engine(self) -> bool:
        """Whether the answer is about the whole engine, and to be cut down by ``of_engine``."""
        return self.path.endswith("/info")

    @property
    def headers(self) -> Mapping[str, str]:
        """What goes with it beside the length."""
        return _UPGRADE if self.attaches else {"Connection": "close"}


def understand(method: str, target: str, body: bytes, limits: Limits) -> Request:
    """The request to send on. Raises ``Refused``."""
    try:
        parts = urlsplit(target)
        query = dict(parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query)))
    except ValueError:
        raise Refused("that is no path with a query") from None
    for wanted, pattern, make in _ROUTES:
        if method == wanted and (found := pattern.fullmatch(parts.path)):
            return make(found, query, body, limits)
    raise Refused(f"{method} {parts.path[:100]} is not let through")


def is_own(inspected: Mapping[str, Any], limits: Limits) -> bool:
    """Whether the container that the engine described was made through this proxy."""
    labels = (inspected.get("Config") or {}).get("Labels") or {}
    return bool(labels.get(OWNER) == limits.owner)


def own_containers(limits: Limits) -> Request:
    """The question for all containers of this proxy, running or not."""
    return Request("GET", "/containers/json", _listing([], limits))


def of_engine(info: Mapping[str, Any]) -> dict[str, Any]:
    """The part of the engine's description that is passed on: the names of its runtimes."""
    return {"Runtimes": {name: {} for name in info.get("Runtimes") or {}}}


# One function per path


def _plain(found: re.Match[str], query: dict[str, str], body: bytes, limits: Limits) -> Request:
    _take(query)
    return Request("GET", found[0], {})


def _image(found: re.Match[str], query: dict[str, str], body: bytes, limits: Limits) -> Request:
    _take(query)
    name = unquote(found["name"])
    _check_image(name, limits)
    return Request("GET", f"{found['api'] or ''}/images/{quote(name, safe='/:')}/json", {})


def _list(found: re.Match[str], query: dict[str, str], body: bytes, limits: Limits) -> Request:
    taken = _take(query, "all", "limit", "size", "trunc_cmd", "filters")
    filters = _json(taken.get("filters", "{}").encode())
    labels = filters.pop("label", [])
    if filters or not _texts(labels):
        raise Refused("containers are listed by their labels only")
    return Request("GET", found[0], _listing(labels, limits))


def _listing(labels: list[str], limits: Limits) -> dict[str, str]:
    return {"all": "1", "filters": json.dumps({"label": [*labels, f"{OWNER}={limits.owner}"]})}


def _create(found: re.Match[str], query: dict[str, str], body: bytes, limits: Limits) -> Request:
    _take(query)
    wanted = _json(body)
    _check(wanted, _CONTAINER, limits, where="")
    host = wanted["HostConfig"]
    _check(host, _HOST, limits, where="HostConfig.")
    if host["MemorySwap"] != host["Memory"]:
        raise Refused("HostConfig.MemorySwap is not HostConfig.Memory")
    wanted["Labels"] = {**wanted["Labels"], OWNER: limits.owner}
    return Request("POST", found[0], {}, json.dumps(wanted).encode())


def _attach(found: re.Match[str], query: dict[str, str], body: bytes, limits: Limits) -> Request:
    streams = ("stdin", "stdout", "stderr", "stream")
    taken = _take(query, *streams)
    return Request(
        "POST", found[0], {name: "1" for name in streams if taken.get(name) in _YES}, container=found["id"]
    )


def _start(found: re.Match[str], query: dict[str, str], body: bytes, limits: Limits) -> Request:
    _take(query)
    if body not in (b"", b"null", b"{}"):
        raise Refused("a start takes no settings")
    return Request("POST", found[0], {}, container=found["id"])


def _remove(found: re.Match[str], query: dict[str, str], body: bytes, limits: Limits) -> Request:
    taken = _take(query, "v", "force", "link")
    if taken.get("link") in _YES:
        raise Refused("there are no links")
    return Request("DELETE", found[0], {"force": "1", "v": "1"}, container=found["id"])


_Make = Callable[[re.Match[str], dict[str, str], bytes, Limits], Request]
_API, _ID = r"(?P<api>/v1\.[0-9]{2})?", r"(?P<id>[0-9a-f]{64})"
_ROUTES: tuple[tuple[str, re.Pattern[str], _Make], ...] = tuple(
    (method, re.compile(f"{_API}(?:{pattern})"), make)
    for method, pattern, make in (
        ("GET", "/_ping|/version|/info", _plain),
        ("GET", "/images/(?P<name>[A-Za-z0-9._:/%@-]{1,300})/json", _image),
        ("GET", "/containers/json", _list),
        ("POST", "/containers/create", _create),
        ("POST", f"/containers/{_ID}/attach", _attach),
        ("POST", f"/containers/{_ID}/start", _start),
        ("DELETE", f"/containers/{_ID}", _remove),
    )
)


# Values of the request to create a container


def _take(query: dict[str, str], *names: str) -> dict[str, str]:
    if unknown := sorted(query.keys() - set(names)):
        raise Refused(f"the parameter {unknown[0][:50]} is not let through")
    return query


def _json(body: bytes) -> dict[str, Any]:
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        raise Refused("that is no JSON") from None
    if not isinstance(found, dict):
        raise Refused("that is no JSON object")
    return found


def _check(values: Mapping[str, Any], rules: Mapping[str, _Rule], limits: Limits, *, where: str) -> None:
    """Every field has a rule and keeps it; none is missing but those that may be."""
    for name, value in values.items():
        if name not in rules:
            raise Refused(f"{where}{name[:50]} is not let through")
        if not rules[name](value, limits):
            raise Refused(f"{where}{name} is not what it must be")
    if missing := sorted(rules.keys() - values.keys() - _OPTIONAL):
        raise Refused(f"{where}{missing[0]} is missing")


def _check_image(name: str, limits: Limits) -> None:
    if not any(fnmatchcase(name, pattern) for pattern in limits.images):
        raise Refused(f"the image {name[:100]} is not let through")


def _image_rule(value: Any, limits: Limits) -> bool:
    if isinstance(value, str):
        _check_image(value, limits)
    return isinstance(value, str)


def _number(value: Any, most: float) -> bool:
    return type(value) is int and 0 < value <= most


def _texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(text, str) for text in value)


def _labels(value: Any, limits: Limits) -> bool:
    return isinstance(value, dict) and all(isinstance(text, str) for text in value.values())


def _tmpfs(value: Any, limits: Limits) -> bool:
    return isinstance(value, dict) and all(
        _TMPFS_FOLDER.fullmatch(folder) and isinstance(options, str) and _TMPFS_OPTIONS.fullmatch(options)
        for folder, options in value.items()
    )


_Rule = Callable[[Any, Limits], bool]


def _is(wanted: object) -> _Rule:
    """Equal, and of the same type: 1 is not True."""
    return lambda value, _: type(value) is type(wanted) and value == wanted


_OPTIONAL = {"Runtime"}
_CONTAINER: dict[str, _Rule] = {
    "Image": _image_rule,
    "Entrypoint": lambda value, _: _texts(value),
    "Cmd": lambda value, _: _texts(value),
    "User": lambda value, _: isinstance(value, str) and bool(_USER.fullmatch(value)),
    "WorkingDir": lambda value, _: isinstance(value, str) and value.startswith("/"),
    "Hostname": lambda value, _: isinstance(value, str),
    "Env": lambda value, _: _texts(value),
    "Labels": _labels,
    "AttachStdin": _is(True),
    "AttachStdout": _is(True),
    "AttachStderr": _is(True),
    "OpenStdin": _is(True),
    "StdinOnce": _is(True),
    "StopTimeout": lambda value, _: type(value) is int and 0 <= value <= 60,
    "HostConfig": lambda value, _: isinstance(value, dict),
}
_HOST: dict[str, _Rule] = {
    "AutoRemove": _is(True),
    "CapDrop": _is(["ALL"]),
    "CgroupnsMode": _is("private"),
    "IpcMode": _is("private"),
    "LogConfig": _is({"Type": "none", "Config": {}}),
    "Memory": lambda value, limits: _number(value, limits.max_memory),
    "MemorySwap": lambda value, limits: _number(value, limits.max_memory),
    "NanoCpus": lambda value, limits: _number(value, limits.max_cpus * 1e9),
    "NetworkMode": _is("none"),
    "PidsLimit": lambda value, limits: _number(value, limits.max_pids),
    "ReadonlyRootfs": _is(True),
    "Runtime": lambda value, limits: value in limits.runtimes,
    "SecurityOpt": _is(["no-new-privileges:true"]),
    "ShmSize": lambda value, limits: _number(value, limits.max_memory),
    "Tmpfs": _tmpfs,
}
