"""Function calls in a runner: a forked child loads the file, calls the function, and reports plain data.

Nothing that decides is in the child: it is given arguments only, and results are compared on the server. Its
report is therefore no more trustworthy than the values in it, and needs only to be well formed: one line per
call, in order, each with the request's nonce, and a clean end of the process.
"""

from __future__ import annotations

import fcntl
import gc
import importlib
import json
import os
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

from hintloop.envs.sandbox import files, limits, values
from hintloop.envs.sandbox.processes import Tree, supervise
from hintloop.envs.sandbox.wire import Channel

_COMMON_IMPORTS = (
    "bisect",
    "collections",
    "functools",
    "heapq",
    "itertools",
    "operator",
    "re",
    "string",
    "typing",
)
"""Imported before any fork, so that a candidate's own imports of them cost nothing."""


def run_calls(
    root: str, path: str, function: str, calls: bytes, *, tree: Tree, server: Channel, timeout: float
) -> tuple[dict[str, Any], bytes]:
    """Call ``function`` of the file ``path`` once per line of ``calls``: a list of arguments as ``values`` writes it.

    The header's ``end`` is ``exit``, ``timeout``, ``memory``, ``processes``, ``died`` or ``forged``;
    the body has one line per finished call, by ``values``: ``{"value": ...}`` or ``{"error": "..."}``.
    """
    report = _secret_report()
    nonce = os.urandom(16).hex().encode()
    source = _source(root, path)
    try:
        pid = os.fork()
        if pid == 0:
            server.close()
            _child(root, path, source, function, calls, report, nonce)
        end, status, _ = supervise(pid, tree=tree, server=server, timeout=timeout)
        lines, genuine = _lines(os.pread(report, limits.VALUES + 1, 0), nonce)
    finally:
        os.close(report)
    if end == "exit" and status != 0:
        end = "died"
    elif end == "exit" and not genuine:
        end = "forged"
    return {"end": end, "code": os.waitstatus_to_exitcode(status)}, b"\n".join(lines)


def _secret_report() -> int:
    """A file in memory at a number that cannot be guessed."""
    report = os.memfd_create("report", os.MFD_CLOEXEC)
    lowest = 32 + os.urandom(1)[0] % (limits.OPEN_FILES - 48)
    try:
        return fcntl.fcntl(report, fcntl.F_DUPFD_CLOEXEC, lowest)
    finally:
        os.close(report)


def _source(root: str, path: str) -> bytes | OSError:
    """The source, or why there is none. Read before the fork: what a child touches first costs more there."""
    try:
        return files.read(root, path)
    except OSError as error:
        return error


def _lines(data: bytes, nonce: bytes) -> tuple[list[bytes], bool]:
    """The payloads up to the first line that the reporter did not write, and whether that was all of them."""
    payloads: list[bytes] = []
    for line in data.split(b"\n")[:-1]:
        prefix = b"%s %d " % (nonce, len(payloads))
        if not line.startswith(prefix):
            return payloads, False
        payloads.append(line[len(prefix) :])
    return payloads, data.endswith(b"\n") or not data


def _child(
    root: str, path: str, source: bytes | OSError, function: str, calls: bytes, report: int, nonce: bytes
) -> None:
    """The life of the child; never returns. What it needs later is bound before foreign code runs."""
    leave: Callable[[int], None] = os._exit
    code = 1
    try:
        os.setsid()
        gc.enable()
        send = _reporter(report, nonce)
        for answer in _answers(root, path, source, function, calls.decode().split("\n")):
            send(answer)
        code = 0
    finally:
        leave(code)


def _reporter(fd: int, nonce: bytes) -> Callable[[str], None]:
    write, counter = os.write, iter(range(1 << 30))

    def send(answer: str) -> None:
        line = b"%s %d %s\n" % (nonce, next(counter), answer.encode("ascii"))
        while line:
            line = line[write(fd, line) :]

    return send


def _answers(root: str, path: str, source: bytes | OSError, function: str, calls: list[str]) -> Iterator[str]:
    """Yield one JSON object text per call."""
    decode, describe, encode = values.decode, _describe, values.encode
    try:
        call = getattr(_load(root, path, source), function)
    except BaseException as error:  # noqa: BLE001 - foreign code may raise anything; it is the answer
        problem = describe(error)
        for _ in calls:
            yield problem
        return
    for arguments in calls:
        try:
            answer = f'{{"value": {encode(call(*decode(arguments)))}}}'
        except BaseException as error:  # noqa: BLE001 - as above
            answer = describe(error)
        yield answer


def _load(root: str, path: str, source: bytes | OSError) -> types.ModuleType:
    if isinstance(source, OSError):
        raise source
    name = path.rpartition("/")[2].removesuffix(".py")
    module = types.ModuleType(name)
    module.__file__ = path
    sys.modules[name] = module
    sys.path.insert(0, root)
    exec(compile(source, path, "exec", dont_inherit=True), module.__dict__)
    return module


def _make_describe() -> Callable[[BaseException], str]:
    dumps, get_name, cap = json.JSONEncoder().encode, type.__dict__["__name__"].__get__, limits.ERROR_CHARS
    kind_of, text_of = type, str

    def describe(error: BaseException) -> str:
        name = get_name(kind_of(error))
        try:
            message = " ".join(text_of(error).split())
        except BaseException:  # noqa: BLE001 - foreign code again; the type is told
            message = ""
        return dumps({"error": (f"{name}: {message}" if message else name)[:cap]})

    return describe


_describe = _make_describe()


def warm_up() -> None:
    """Do once, before any fork, what every child does first: the compiler's first use takes milliseconds."""
    for name in _COMMON_IMPORTS:
        importlib.import_module(name)
    namespace: dict[str, Any] = {}
    exec(compile("def warm(x):\n    return [x + 1, 'a', {'b': 0.5}]\n", "warm", "exec"), namespace)
    values.decode(values.encode(namespace["warm"](1)))
    _describe(ValueError("warm"))
