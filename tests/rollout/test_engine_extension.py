"""What runs inside vLLM, without vLLM: fetching, verifying, reading tensors, and the tied head."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from hintloop.replay.weights import DigestMismatch, WeightStore
from hintloop.rollout.vllm_extension import (
    ALLOWED,
    CACHE,
    KEPT_VERSIONS,
    STALE_S,
    Fetcher,
    WorkerExtension,
    check_layout,
    check_sizes,
    fetch,
    iter_tensors,
    packed_tied_heads,
    read_config,
    read_layout,
    verify,
)


def publish(root: Path, version: int, **tensors: torch.Tensor) -> WeightStore:
    made = root / "made"
    made.mkdir(exist_ok=True)
    save_file(tensors or {"weight": torch.full((2, 3), float(version))}, made / "model.safetensors")
    store = WeightStore(root / "weights")
    store.publish(version, made, metadata={})
    return store


class Worker(WorkerExtension):
    """A worker whose model is the tensors that it was given."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.model_config: Any = None

    def hintloop_apply(self, folder: Path, version: int) -> None:
        self.tensors = dict(iter_tensors(folder))
        if version == 13:
            raise RuntimeError("out of memory")


def wait_ready(worker: WorkerExtension, state: str = "ready") -> dict[str, Any]:
    deadline = time.monotonic() + 60
    while (status := worker.hintloop_status())["state"] == "fetching" and time.monotonic() < deadline:
        time.sleep(0.005)
    assert status["state"] == state, status
    return status


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Worker:
    monkeypatch.setenv(CACHE, str(tmp_path / "cache"))
    return Worker()


def test_it_imports_without_torch_and_without_the_rest_of_the_loop() -> None:
    code = (
        "import sys, hintloop.rollout.vllm_extension\n"
        "heavy = {'torch', 'safetensors', 'openenv', 'pydantic', 'transformers', 'httpx', 'pyarrow'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert ran.stdout.strip() == "[]"


def test_its_methods_cannot_collide_with_those_of_a_worker() -> None:
    names = [name for name in dir(WorkerExtension) if not name.startswith("__")]
    assert names
    assert all(name.startswith("hintloop_") for name in names)


def test_a_version_is_fetched_and_then_loaded(worker: Worker, tmp_path: Path) -> None:
    uri = publish(tmp_path, 4).uri
    assert worker.hintloop_status()["state"] == "idle"
    assert worker.hintloop_load(4)["intact"]
    worker.hintloop_fetch(uri, 4)
    assert wait_ready(worker)["version"] == 4
    assert worker.hintloop_load(4) == {"ok": True, "intact": True, "error": ""}
    assert worker.tensors["weight"].tolist() == [[4.0] * 3] * 2
    assert "version 5 is not fetched" in worker.hintloop_load(5)["error"]


def test_a_load_that_breaks_half_way_says_that_the_model_is_lost(worker: Worker, tmp_path: Path) -> None:
    worker.hintloop_fetch(publish(tmp_path, 13).uri, 13)
    wait_ready(worker)
    answer = worker.hintloop_load(13)
    assert answer == {"ok": False, "intact": False, "error": "RuntimeError: out of memory"}


def test_a_version_of_another_model_than_the_served_one_is_refused(worker: Worker, tmp_path: Path) -> None:
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "config.json").write_text(json.dumps({"hidden_size": 64, "vocab_size": 949}))
    worker.model_config = SimpleNamespace(hf_config=SimpleNamespace(hidden_size=128, vocab_size=949))
    worker.hintloop_fetch(publish(tmp_path, 0).uri, 0)
    wait_ready(worker)
    answer = worker.hintloop_load(0)
    assert answer["intact"]
    assert "another model: its hidden_size is 128, and that of the version 64" in answer["error"]
    check_sizes(read_config(tmp_path), worker.model_config.hf_config)  # a version that does not say


def test_a_version_with_other_tensors_is_refused_before_the_model_is_touched(
    worker: Worker, tmp_path: Path
) -> None:
    uri = publish(tmp_path, 0).uri
    publish(tmp_path, 1, weight=torch.zeros(2, 4))
    for version in (0, 1):
        worker.hintloop_fetch(uri, version)
        wait_ready(worker)
        answer = worker.hintloop_load(version)
    assert (answer["ok"], answer["intact"]) == (False, True)
    assert "weight" in answer["error"]
    assert worker.tensors["weight"].shape == (2, 3)


def test_a_version_can_be_asked_about_before_any_of_it_is_sent(worker: Worker) -> None:
    worker.model_config = SimpleNamespace(hf_config=SimpleNamespace(hidden_size=128))
    assert worker.hintloop_suits({"hidden_size": 128}) == {"ok": True, "error": ""}
    answer = worker.hintloop_suits({"hidden_size": 64})
    assert not answer["ok"]
    assert "another model" in answer["error"]


def test_a_worker_ends_in_time_unless_it_is_told_otherwise(worker: Worker) -> None:
    ended = threading.Event()
    worker.hintloop_quit = lambda: {"ok": not ended.set()}  # type: ignore[method-assign]
    timers = []
    for delay in (600.0, 600.0, 0.0):  # only the last one counts
        worker.hintloop_end_in(delay)
        timers.append(worker.hintloop_timer)
    for timer in timers[:-1]:
        assert timer
        timer.join(30)
        assert not timer.is_alive()
    assert timers[-1] is None
    assert not ended.is_set()
    worker.hintloop_end_in(0.05)
    assert ended.wait(30)


def test_a_part_of_a_version_is_fetched_beside_the_whole(worker: Worker, tmp_path: Path) -> None:
    part = tmp_path / "made" / "adapter"
    part.mkdir(parents=True)
    save_file({"a": torch.ones(2)}, part / "adapter_model.safetensors")
    uri = publish(tmp_path, 4).uri
    worker.hintloop_fetch(uri, 4, under="adapter/")
    folder = Path(wait_ready(worker)["folder"])
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert files == {"manifest.json", "adapter/adapter_model.safetensors"}
    assert verify(folder).version == 4
    assert "version 4 is not fetched" in worker.hintloop_load(4)["error"]
    worker.hintloop_fetch(uri, 4)
    assert Path(wait_ready(worker)["folder"]) != folder
    assert worker.hintloop_load(4)["ok"]
    worker.hintloop_fetch(uri, 4, under="other/")
    assert "no files below other/" in wait_ready(worker, "failed")["error"]


def test_a_missing_version_is_a_failed_fetch_that_can_be_repeated(worker: Worker, tmp_path: Path) -> None:
    store = publish(tmp_path, 0)
    worker.hintloop_fetch(store.uri, 1)
    assert "has no weights of version 1" in wait_ready(worker, "failed")["error"]
    publish(tmp_path, 1)
    worker.hintloop_fetch(store.uri, 1)
    assert wait_ready(worker)["version"] == 1


def test_only_the_allowed_place_is_fetched_from(
    worker: Worker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = publish(tmp_path, 0)
    monkeypatch.setenv(ALLOWED, store.uri + "/")
    worker.hintloop_fetch(store.uri, 0)
    wait_ready(worker)
    with pytest.raises(ValueError, match="weights from"):
        worker.hintloop_fetch(str(tmp_path / "elsewhere"), 0)


def test_a_copy_that_was_damaged_on_the_disk_is_fetched_again(tmp_path: Path) -> None:
    uri = publish(tmp_path, 0).uri
    folder = fetch(uri, 0, cache=tmp_path / "cache")
    path = folder / "model.safetensors"
    good = path.read_bytes()
    path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    with pytest.raises(DigestMismatch):
        verify(folder)
    assert fetch(uri, 0, cache=tmp_path / "cache") == folder
    assert path.read_bytes() == good
    assert verify(folder).version == 0


def test_workers_that_share_a_cache_fetch_once_and_old_versions_go(tmp_path: Path) -> None:
    for version in range(KEPT_VERSIONS + 2):
        store = publish(tmp_path, version)
        threads = [
            threading.Thread(target=fetch, args=(store.uri, version), kwargs={"cache": tmp_path / "cache"})
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
    (place,) = (tmp_path / "cache").iterdir()
    assert sorted(path.name for path in place.glob("v*")) == ["v000002", "v000003", "v000004"]


def test_what_no_run_uses_any_more_is_deleted(tmp_path: Path) -> None:
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
    cache = tmp_path / "cache"
    fetch(publish(tmp_path / "old", 0).uri, 0, cache=cache)
    (before,) = cache.iterdir()
    long_ago = time.time() - 2 * STALE_S
    os.utime(before / ".lock", (long_ago, long_ago))
    folder = fetch(publish(tmp_path / "new", 0).uri, 0, cache=cache)
    assert [path for path in cache.iterdir() if path.is_dir()] == [folder.parent]


def test_a_fetch_that_is_overtaken_does_not_count() -> None:
    go_on = threading.Event()

    def slow(uri: str, version: int, under: str) -> Path:
        if version == 1:
            go_on.wait(10)
        return Path(f"v{version}")

    fetcher = Fetcher(slow)
    fetcher.start("here", 1)
    fetcher.start("here", 2)
    deadline = time.monotonic() + 10
    while fetcher.status()["state"] != "ready" and time.monotonic() < deadline:
        time.sleep(0.005)
    go_on.set()
    assert fetcher.folder(2) == Path("v2")
    with pytest.raises(ValueError, match="version 1 is not fetched"):
        fetcher.folder(1)


def test_a_damaged_header_is_found_without_reading_tensors(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no tensors"):
        read_layout(tmp_path)
    path = tmp_path / "model.safetensors"
    for content in (b"", b"\xff" * 16, b"\x02\0\0\0\0\0\0\0[]", b"\x0a\0\0\0\0\0\0\0" + b'{"a": {}}   '):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"model\.safetensors"):
            read_layout(tmp_path)
    save_file({"a": torch.zeros(2, 3), "b": torch.zeros(1, dtype=torch.bfloat16)}, path)
    layout = read_layout(tmp_path)
    assert layout == {"a": ("F32", (2, 3)), "b": ("BF16", (1,))}
    check_layout(layout, None)
    with pytest.raises(ValueError, match="1 tensors"):
        check_layout(layout, {**layout, "a": ("F32", (3, 2))})


class Embedding(torch.nn.Module):
    def __init__(self, weight: torch.nn.Parameter, *, packed: bool) -> None:
        super().__init__()
        self.weight = weight
        if packed:
            self.cpu_linear = lambda states: states


class LanguageHead(Embedding):
    """In vLLM too, a head is an embedding."""


@pytest.mark.parametrize(
    ("tied", "packed", "found"), [(True, True, ["head"]), (False, True, []), (True, False, [])]
)
def test_only_a_packed_head_that_is_tied_is_packed_again(tied: bool, packed: bool, found: list[str]) -> None:
    weight = torch.nn.Parameter(torch.zeros(4, 2))
    model = torch.nn.Module()
    model.embed = Embedding(weight, packed=packed)
    model.head = LanguageHead(weight if tied else torch.nn.Parameter(torch.zeros(4, 2)), packed=packed)
    assert list(packed_tied_heads(model, LanguageHead, Embedding)) == found


def test_the_answers_are_plain_json(worker: Worker, tmp_path: Path) -> None:
    answers = [
        worker.hintloop_fetch(publish(tmp_path, 0).uri, 0),
        wait_ready(worker),
        worker.hintloop_load(0),
    ]
    assert json.loads(json.dumps(answers)) == answers
    assert os.environ[CACHE] == str(tmp_path / "cache")
