"""Sends the tensors of versions to one vLLM server: ``python -m hintloop.rollout.vllm_sender --backend nccl``.

For vLLM's own environment: vLLM's side of NCCL expects its own classes on the other one. Started by the rollout
process, which tells the server meanwhile what to do; it reads one line of JSON for each command and writes one for its
answer. ``offer`` says what the server must know to join, ``join`` meets it, ``describe`` verifies a version's folder
and says what will come, and ``send`` sends that. It ends with its input.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NoReturn, Protocol, TextIO

from hintloop.rollout.vllm_extension import Layout, check_layout, read_layout, verify

PACKED: Mapping[str, Any] = {
    "packed": True,
    "packed_buffer_size_bytes": 256 << 20,
    "packed_num_buffers": 2,
}
"""Tensors go in pieces of this size; both sides must know."""
DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}
"""Element types of safetensors, as torch calls them."""


class Link(Protocol):
    """One side of a transfer."""

    def offer(self, host: str, workers: int) -> dict[str, Any]:
        """What the ``workers`` of the server at ``host`` must know to join."""
        ...

    def join(self) -> None:
        """Meet them; blocks until all are there."""
        ...

    def describe(self, folder: Path) -> dict[str, Any]:
        """What they must know of a version to receive it; it is the one that is sent next."""
        ...

    def send(self) -> None:
        """Send it; blocks until they have it."""
        ...


class NcclLink:
    """Broadcasts from this process's first GPU, which must be none of the server's."""

    def __init__(self) -> None:
        self._place: dict[str, Any] = {}
        self._group: Any = None
        self._folder = Path()
        self._names: list[str] = []

    def offer(self, host: str, workers: int) -> dict[str, Any]:
        """See ``Link``; the server meets this process at the address by which this one reaches it."""
        address = address_towards(host)
        with socket.create_server((address, 0)) as free:
            port = free.getsockname()[1]
        self._place = {"master_address": address, "master_port": port, "world_size": workers + 1}
        return {**self._place, "rank_offset": 1, **PACKED}

    def join(self) -> None:
        """See ``Link``."""
        from vllm.distributed.weight_transfer.nccl_common import (  # type: ignore[import-not-found]
            trainer_init,
        )

        self._group = trainer_init(self._place)

    def describe(self, folder: Path) -> dict[str, Any]:
        """See ``Link``."""
        self._folder, told = folder, update_info(read_layout(folder))
        self._names = told["names"]
        return told

    def send(self) -> None:
        """See ``Link``."""
        from vllm.distributed.weight_transfer.packed_tensor import (  # type: ignore[import-not-found]
            packed_nccl_broadcast_producer,
        )

        packed_nccl_broadcast_producer(
            iterator=tensors(self._folder, self._names),
            group=self._group,
            src=0,
            post_iter_func=lambda item: item[1].to(self._group.device),
            buffer_size_bytes=PACKED["packed_buffer_size_bytes"],
            num_buffers=PACKED["packed_num_buffers"],
        )


class SimLink:
    """For simulated servers: the files of a version, over a plain connection."""

    def __init__(self) -> None:
        self._door: socket.socket | None = None
        self._workers = 0
        self._peers: list[socket.socket] = []
        self._folder = Path()

    def offer(self, host: str, workers: int) -> dict[str, Any]:
        """See ``Link``."""
        address = address_towards(host)
        self._door, self._workers = socket.create_server((address, 0)), workers
        return {"address": address, "port": self._door.getsockname()[1], "world_size": workers + 1}

    def join(self) -> None:
        """See ``Link``."""
        assert self._door is not None
        self._peers = [self._door.accept()[0] for _ in range(self._workers)]

    def describe(self, folder: Path) -> dict[str, Any]:
        """See ``Link``."""
        self._folder = folder
        return update_info(read_layout(folder))

    def send(self) -> None:
        """See ``Link``."""
        for peer in self._peers:
            send_files(peer, self._folder)


LINKS: dict[str, Callable[[], Link]] = {"nccl": NcclLink, "sim": SimLink}
"""By the name that the server has for its side."""


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Answer commands until there is no more input."""
    parser = argparse.ArgumentParser(prog="python -m hintloop.rollout.vllm_sender", allow_abbrev=False)
    parser.add_argument("--backend", required=True, help="what the server transfers weights by")
    backend = parser.parse_args(arguments).backend
    answers = own_output()
    commands: queue.Queue[str] = queue.Queue(maxsize=1)
    threading.Thread(target=read_commands, args=(commands,), daemon=True).start()
    sender = Sender(backend)
    while True:
        print(json.dumps(sender.answer(commands.get())), file=answers, flush=True)


class Sender:
    """Carries out commands."""

    def __init__(self, backend: str) -> None:
        """``backend`` is one of ``LINKS``; for another one, each command fails and says so."""
        self._backend = backend
        self._link: Link | None = None
        self._layout: Layout | None = None

    def answer(self, line: str) -> dict[str, Any]:
        """What a command brought: ``{"ok": true, ...}``, or ``{"ok": false, "error": text}``."""
        try:
            command = json.loads(line)
            return {"ok": True, **self._do(command.pop("do"), **command)}
        except Exception as error:  # noqa: BLE001 - the process's boundary; whoever asked is told
            return {"ok": False, "error": f"{type(error).__name__}: {error}"}

    def _do(self, what: str, **details: Any) -> dict[str, Any]:
        if self._link is None:
            if self._backend not in LINKS:
                raise ValueError(f"the backend is one of {', '.join(LINKS)}, not {self._backend}")
            self._link = LINKS[self._backend]()
        if what == "offer":
            return {"init_info": self._link.offer(**details)}
        if what == "join":
            self._link.join()
            return {}
        if what == "describe":
            return {"update_info": self._describe(self._link, Path(details["folder"]))}
        if what == "send":
            self._link.send()
            return {}
        raise ValueError(f"there is no command {what!r}")

    def _describe(self, link: Link, folder: Path) -> dict[str, Any]:
        verify(folder)
        layout = read_layout(folder)
        check_layout(layout, self._layout)
        self._layout = layout
        return link.describe(folder)


def update_info(layout: Layout) -> dict[str, Any]:
    """What vLLM's workers must know of the tensors, in the order in which they come."""
    return {
        "names": list(layout),
        "dtype_names": [DTYPES[kind] for kind, _ in layout.values()],
        "shapes": [list(shape) for _, shape in layout.values()],
    }


def tensors(folder: Path, names: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Name and tensor, on the CPU, in the given order."""
    from safetensors import safe_open

    with contextlib.ExitStack() as stack:
        homes: dict[str, Any] = {}
        for path in sorted(folder.glob("*.safetensors")):
            file = stack.enter_context(safe_open(path, framework="pt", device="cpu"))
            homes |= dict.fromkeys(file.keys(), file)
        for name in names:
            yield name, homes[name].get_tensor(name)


def send_files(peer: socket.socket, folder: Path) -> None:
    """All files of a folder over a connection."""
    files = {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}
    peer.sendall(json.dumps({name: len(content) for name, content in files.items()}).encode() + b"\n")
    for content in files.values():
        peer.sendall(content)


def receive_files(source: IO[bytes], folder: Path) -> None:
    """The other side of ``send_files``. ``ConnectionError`` when it breaks off."""
    line = source.readline()
    for name, size in (json.loads(line) if line else {"": 1}).items():
        content = source.read(size)
        if len(content) < size:
            raise ConnectionError("the sender is gone")
        (folder / Path(name).name).write_bytes(content)


def address_towards(host: str) -> str:
    """This machine's address as ``host`` can reach it; nothing is sent to find out."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        return str(probe.getsockname()[0])


def own_output() -> TextIO:
    """Standard output for answers alone; what libraries print goes to standard error from now on."""
    own = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return own


def read_commands(commands: queue.Queue[str]) -> None:
    """Hand on commands, and end this process with its input, whatever it is waiting for."""
    for line in sys.stdin:
        commands.put(line)
    os._exit(0)


if __name__ == "__main__":
    main()
