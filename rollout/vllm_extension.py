"""What runs inside a vLLM worker: ``--worker-extension-cls hintloop.rollout.vllm_extension.WorkerExtension``.

The rollout side calls the ``hintloop_*`` methods through ``POST /collective_rpc``. Such a call stops the whole
engine until it returns, so fetching runs in a thread and is asked after; only ``hintloop_load`` takes its time,
while generation is paused. Everything that can be wrong with a version is found before the model is touched:
vLLM cannot undo half a load.

vLLM has an environment of its own. This module needs only ``fsspec`` and ``structlog`` there (for
``hintloop.replay.weights``), and torch and safetensors when it loads.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import IO, Any

from hintloop.replay.storage import read_chunks
from hintloop.replay.weights import MANIFEST, DigestMismatch, Manifest, WeightStore, version_name

CACHE = "HINTLOOP_WEIGHTS_CACHE"
"""Environment variable: folder that versions are fetched into."""
ALLOWED = "HINTLOOP_WEIGHTS_URI"
"""Environment variable: when set, weights are taken from this URI only, whatever the caller says."""
KEPT_VERSIONS = 3
STALE_S = 2 * 86400.0
"""Versions of a URI that nothing was fetched from for this long are deleted."""
QUIT_S = 0.5
"""Time for the answer to leave before the worker ends."""
SIZES = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
)
"""What a version's ``config.json`` must say as the model that the server was started with."""
_MAX_HEADER_BYTES = 100 << 20

_log = logging.getLogger(__name__)

Layout = dict[str, tuple[str, tuple[int, ...]]]
"""Tensor name -> element type and shape."""


class WorkerExtension:
    """Methods added to a vLLM worker. Their names must not collide with the worker's own."""

    hintloop_fetcher: Fetcher | None = None
    hintloop_layout: Layout | None = None
    hintloop_timer: threading.Timer | None = None

    def hintloop_fetch(self, uri: str, version: int, under: str = "") -> dict[str, Any]:
        """Start to fetch a version, unless that is going on; the answer is that of ``hintloop_status``.

        With ``under``, such as ``adapter/``, only the files whose names begin so.
        """
        if self.hintloop_fetcher is None:
            self.hintloop_fetcher = Fetcher(partial(fetch, cache=cache_folder()))
        self.hintloop_fetcher.start(uri, version, under)
        return self.hintloop_status()

    def hintloop_status(self) -> dict[str, Any]:
        """``{"state": "idle|fetching|ready|failed", "version": n, "folder": path, "error": text}``."""
        if self.hintloop_fetcher is None:
            return {"state": "idle", "version": -1, "folder": "", "error": ""}
        return self.hintloop_fetcher.status()

    def hintloop_load(self, version: int) -> dict[str, Any]:
        """Load a fetched version into the model; call it while generation is paused.

        ``{"ok": bool, "intact": bool, "error": text}``: when ``intact`` is false the model is lost, and the
        server must end.
        """
        try:
            if self.hintloop_fetcher is None:
                raise ValueError("nothing was fetched")
            folder = self.hintloop_fetcher.folder(version)
            check_sizes(read_config(folder), self.hintloop_config())
            layout = read_layout(folder)
            check_layout(layout, self.hintloop_layout)
        except (OSError, ValueError) as error:
            return {"ok": False, "intact": True, "error": f"{type(error).__name__}: {error}"}
        try:
            self.hintloop_apply(folder, version)
        except Exception as error:  # noqa: BLE001 - whatever it is, the model is lost; recorded and answered
            _log.exception("loading version %d failed", version)
            return {"ok": False, "intact": False, "error": f"{type(error).__name__}: {error}"}
        self.hintloop_layout = layout
        return {"ok": True, "intact": True, "error": ""}

    def hintloop_apply(self, folder: Path, version: int) -> None:
        """Put the tensors of ``folder`` into vLLM's model."""
        worker: Any = self
        worker.reload_weights(weights_iterator=iter_tensors(folder))
        repacked = repack_tied_heads(worker.model_runner.get_model())
        if repacked:
            _log.info("version %d: packed %s again", version, ", ".join(repacked))

    def hintloop_config(self) -> Any:
        """The configuration of vLLM's model."""
        return getattr(getattr(self, "model_config", None), "hf_config", None)

    def hintloop_suits(self, config: dict[str, Any]) -> dict[str, Any]:
        """Whether a version with this ``config.json`` is of the served model: ``{"ok": bool, "error": text}``."""
        try:
            check_sizes(config, self.hintloop_config())
        except ValueError as error:
            return {"ok": False, "error": str(error)}
        return {"ok": True, "error": ""}

    def hintloop_end_in(self, delay: float) -> dict[str, Any]:
        """End this process in ``delay`` seconds, unless called again before; 0: not any more.

        For a transfer whose sender may die: vLLM waits for it without end, and answers no call meanwhile.
        """
        if self.hintloop_timer is not None:
            self.hintloop_timer.cancel()
            self.hintloop_timer = None
        if delay > 0:
            self.hintloop_timer = threading.Timer(delay, self.hintloop_quit)
            self.hintloop_timer.daemon = True
            self.hintloop_timer.start()
        return {"ok": True}

    def hintloop_quit(self) -> dict[str, Any]:
        """End this process soon: a server whose model is lost must not stay up and look healthy."""
        _log.error("the model is lost; this worker ends")
        timer = threading.Timer(QUIT_S, os._exit, args=(1,))
        timer.daemon = True
        timer.start()
        return {"ok": True}


class Fetcher:
    """Fetches and verifies one version at a time, in a thread. Its methods never block."""

    def __init__(self, fetch: Callable[[str, int, str], Path]) -> None:
        """``fetch`` gives the local folder of (URI, version, beginning of names), verified; it may block."""
        self._fetch = fetch
        self._lock = threading.Lock()
        self._wanted: tuple[str, int, str] | None = None
        self._state = "idle"
        self._error = ""
        self._folder = Path()

    def start(self, uri: str, version: int, under: str = "") -> None:
        """``ValueError`` for a URI that is not allowed here.

        What was fetched before is compared with what the URI holds now: it may have been deleted, or published anew.
        """
        allowed = os.environ.get(ALLOWED)
        if allowed and uri.rstrip("/") != allowed.rstrip("/"):
            raise ValueError(f"this server takes weights from {allowed} only, not from {uri}")
        with self._lock:
            if self._wanted == (uri, version, under) and self._state == "fetching":
                return
            self._wanted, self._state, self._error = (uri, version, under), "fetching", ""
        wanted = (uri, version, under)
        threading.Thread(target=self._run, args=wanted, name=f"fetch-{version}", daemon=True).start()

    def status(self) -> dict[str, Any]:
        """State, version, folder and error as JSON data."""
        with self._lock:
            version = -1 if self._wanted is None else self._wanted[1]
            folder = str(self._folder) if self._state == "ready" else ""
            return {"state": self._state, "version": version, "folder": folder, "error": self._error}

    def folder(self, version: int) -> Path:
        """Where a whole version lies. ``ValueError`` unless it is the one that was fetched last."""
        with self._lock:
            if self._state != "ready" or self._wanted is None or self._wanted[1:] != (version, ""):
                raise ValueError(f"version {version} is not fetched")
            return self._folder

    def _run(self, uri: str, version: int, under: str) -> None:
        state, error, folder = "failed", "", Path()
        try:
            folder = self._fetch(uri, version, under)
            state = "ready"
        except Exception as problem:  # noqa: BLE001 - the thread's boundary; recorded in the status
            error = f"{type(problem).__name__}: {problem}"
            _log.warning("fetching version %d failed: %s", version, error)
        with self._lock:
            if self._wanted == (uri, version, under):
                self._state, self._error, self._folder = state, error, folder


def cache_folder() -> Path:
    """Where versions are fetched into."""
    return Path(os.environ.get(CACHE) or Path.home() / ".cache" / "hintloop" / "weights")


def fetch(uri: str, version: int, under: str = "", *, cache: Path) -> Path:
    """A local folder with exactly the files of a version, each digest checked by this call.

    With ``under``, those whose names begin so. The cache may be shared by the workers of a machine: one fetches, the
    others wait for it. Raises ``DigestMismatch``, ``OSError``, ``ValueError``.
    """
    place = cache / hashlib.sha256((f"{uri}#{under}" if under else uri).encode()).hexdigest()[:12]
    place.mkdir(parents=True, exist_ok=True)
    with (place / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        was_there = (place / version_name(version)).exists()
        folder = WeightStore(uri).fetch(version, place, under=under)
        if was_there:  # perhaps damaged since
            try:
                verify(folder)
            except DigestMismatch:
                shutil.rmtree(folder)
                folder = WeightStore(uri).fetch(version, place, under=under)
        # Higher ones are of a run that began anew under this URI, and are replaced when their turn comes.
        for old in sorted(path for path in place.glob("v*") if path.name <= folder.name)[:-KEPT_VERSIONS]:
            shutil.rmtree(old, ignore_errors=True)
    _sweep(cache)
    return folder


def verify(folder: Path) -> Manifest:
    """Compare every file with the folder's manifest. Raises ``DigestMismatch``, ``OSError``, ``ValueError``."""
    manifest = Manifest.from_json((folder / MANIFEST).read_bytes())
    for name, expected in manifest.files.items():
        with (folder / name).open("rb") as file:
            digest = hashlib.sha256()
            for chunk in read_chunks(file):
                digest.update(chunk)
        if digest.hexdigest() != expected.sha256:
            raise DigestMismatch(f"{folder / name} is not what was published")
    return manifest


def iter_tensors(folder: Path) -> Iterator[tuple[str, Any]]:
    """Name and tensor of everything in the folder's safetensors files, one at a time."""
    from safetensors import safe_open

    for path in _tensor_files(folder):
        with safe_open(path, framework="pt", device="cpu") as file:
            for name in file.keys():  # noqa: SIM118 - not a dict
                yield name, file.get_tensor(name)


def read_layout(folder: Path) -> Layout:
    """What tensors a folder holds, read from the headers. ``ValueError`` for none or for a damaged file."""
    layout: Layout = {}
    for path in _tensor_files(folder):
        with path.open("rb") as file:
            layout.update(_header(file, path))
    if not layout:
        raise ValueError(f"{folder} holds no tensors")
    return layout


def read_config(folder: Path) -> dict[str, Any]:
    """What the model in a folder says of itself; nothing if it does not."""
    path = folder / "config.json"
    config: dict[str, Any] = json.loads(path.read_bytes()) if path.is_file() else {}
    return config


def check_sizes(config: dict[str, Any], served: Any) -> None:
    """``ValueError`` when a version is of another model than ``served``, the configuration of vLLM's."""
    for name in SIZES:
        ours, theirs = config.get(name), getattr(served, name, None)
        if None not in (ours, theirs) and ours != theirs:
            raise ValueError(
                f"the server was started with another model: its {name} is {theirs}, and that of the version {ours}"
            )


def check_layout(new: Layout, old: Layout | None) -> None:
    """``ValueError`` when a version has other tensors than the one that was loaded before it."""
    if old is None or new == old:
        return
    names = [name for name in sorted(new.keys() | old.keys()) if new.get(name) != old.get(name)]
    raise ValueError(f"{len(names)} tensors are not as in the version before, such as {names[0]}")


def repack_tied_heads(model: Any) -> list[str]:
    """Let LM heads that share their weight with an embedding compute from the new one; their names.

    vLLM's CPU build computes from packed copies. A reload packs the embedding again but not a head that is
    tied to it, which would silently go on with the old weights. Elsewhere nothing is packed.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import (  # type: ignore[import-not-found]
        ParallelLMHead,
        VocabParallelEmbedding,
    )

    heads = packed_tied_heads(model, ParallelLMHead, VocabParallelEmbedding)
    for head in heads.values():
        head.quant_method.process_weights_after_loading(head)
    return list(heads)


def packed_tied_heads(model: Any, head_class: Any, embedding_class: Any) -> dict[str, Any]:
    """The heads, by name, that have a packed copy and share their weight with an embedding."""
    modules: dict[str, Any] = dict(model.named_modules())
    shared = {
        id(module.weight)
        for module in modules.values()
        if isinstance(module, embedding_class)
        and not isinstance(module, head_class)
        and hasattr(module, "weight")
    }
    return {
        name: module
        for name, module in modules.items()
        if isinstance(module, head_class) and hasattr(module, "cpu_linear") and id(module.weight) in shared
    }


def _tensor_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def _header(file: IO[bytes], path: Path) -> Layout:
    size = int.from_bytes(file.read(8), "little")
    if not 2 <= size <= _MAX_HEADER_BYTES:
        raise ValueError(f"{path.name} is not a safetensors file")
    try:
        header = json.loads(file.read(size))
        return {
            name: (str(entry["dtype"]), tuple(int(n) for n in entry["shape"]))
            for name, entry in header.items()
            if name != "__metadata__"
        }
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{path.name} has a damaged header: {error!r}") from error


def _sweep(cache: Path) -> None:
    for lock in cache.glob("*/.lock"):
        if time.time() - lock.stat().st_mtime > STALE_S:
            shutil.rmtree(lock.parent, ignore_errors=True)
