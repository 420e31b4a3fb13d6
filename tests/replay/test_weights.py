"""A weight version is there whole or not at all, and what is fetched is what was published."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import fsspec
import pytest
import structlog
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hintloop.replay.weights import DigestMismatch, FileEntry, Manifest, WeightStore

PUBLISH_FOREVER = """
import sys
from pathlib import Path
from hintloop.replay.weights import WeightStore

store, folder = WeightStore(sys.argv[1]), Path(sys.argv[2])
folder.mkdir(exist_ok=True)
latest = store.latest()
version = latest.version + 1 if latest else 0
while True:
    for i in range(3):
        (folder / f"part{i}").write_bytes(bytes([version % 251, i]) * 40_000)
    store.publish(version, folder, metadata={"version": version})
    print(version, flush=True)
    store.prune(3)
    version += 1
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Files to publish, one of them in a folder."""
    path = tmp_path / "model"
    (path / "nested").mkdir(parents=True)
    (path / "model.safetensors").write_bytes(b"weights" * 1000)
    (path / "nested" / "config.json").write_text("{}")
    return path


def path_of(uri: str, name: str) -> tuple[fsspec.AbstractFileSystem, str]:
    fs, root = fsspec.core.url_to_fs(uri)
    return fs, f"{root}/{name}"


def overwrite(uri: str, name: str, content: bytes) -> None:
    fs, path = path_of(uri, name)
    fs.makedirs(path.rpartition("/")[0], exist_ok=True)
    fs.pipe_file(path, content)


def contents(folder: Path) -> dict[str, bytes]:
    files = {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()
    }
    files.pop("manifest.json", None)
    return files


def test_what_is_fetched_is_what_was_published(uri: str, folder: Path, tmp_path: Path) -> None:
    store = WeightStore(uri)
    assert (store.latest(), store.versions()) == (None, [])
    manifest = store.publish(42, folder, metadata={"probe": [-1.5], "step": 7})
    assert manifest == store.latest() == store.manifest(42)
    assert manifest.metadata == {"probe": [-1.5], "step": 7}
    assert manifest.files["model.safetensors"] == FileEntry(
        hashlib.sha256(b"weights" * 1000).hexdigest(), 7000
    )
    assert manifest.created_at == pytest.approx(time.time(), abs=60)
    fetched = store.fetch(42, tmp_path / "cache")
    assert fetched == tmp_path / "cache" / "v000042"
    assert contents(fetched) == contents(folder)
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["v000042"]


def test_a_part_of_a_version_can_be_fetched_alone(uri: str, folder: Path, tmp_path: Path) -> None:
    store = WeightStore(uri)
    store.publish(42, folder, metadata={"step": 7})
    fetched = store.fetch(42, tmp_path / "part", under="nested/")
    assert contents(fetched) == {"nested/config.json": b"{}"}
    manifest = Manifest.from_json((fetched / "manifest.json").read_bytes())
    assert (manifest.version, list(manifest.files), manifest.metadata) == (
        42,
        ["nested/config.json"],
        {"step": 7},
    )
    overwrite(uri, "v000042/nested/config.json", b"[]")
    assert store.fetch(42, tmp_path / "part", under="nested/") == fetched  # it is there
    with pytest.raises(DigestMismatch):
        store.fetch(42, tmp_path / "other", under="nested/")
    with pytest.raises(ValueError, match="no files below adapter/"):
        store.fetch(42, tmp_path / "other", under="adapter/")


def test_publishing_the_same_again_changes_nothing(uri: str, folder: Path) -> None:
    store = WeightStore(uri)
    first = store.publish(1, folder, metadata={"step": 1})
    assert store.publish(1, folder, metadata={"step": 1}) == first
    assert store.versions() == [1]


def test_publishing_other_files_under_the_same_version_is_refused(uri: str, folder: Path) -> None:
    store = WeightStore(uri)
    first = store.publish(1, folder, metadata={})
    (folder / "model.safetensors").write_bytes(b"other")
    with pytest.raises(ValueError, match="version 1 already, with other files"):
        store.publish(1, folder, metadata={})
    assert store.latest() == first


@pytest.mark.parametrize("metadata", [{"probe": float("nan")}, {"probe": object()}])
def test_metadata_that_is_not_json_is_refused_before_anything_is_written(
    tmp_path: Path, folder: Path, metadata: dict[str, object]
) -> None:
    with pytest.raises((ValueError, TypeError), match="JSON"):
        WeightStore(tmp_path / "store").publish(0, folder, metadata=metadata)
    assert not (tmp_path / "store").exists()


def test_an_empty_folder_a_negative_version_and_a_manifest_among_the_files_are_refused(
    tmp_path: Path, folder: Path
) -> None:
    store = WeightStore(tmp_path / "store")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="0 files"):
        store.publish(0, tmp_path / "empty", metadata={})
    with pytest.raises(ValueError, match="version -1"):
        store.publish(-1, folder, metadata={})
    (folder / "manifest.json").write_text("{}")
    with pytest.raises(ValueError, match=r"manifest\.json"):
        store.publish(0, folder, metadata={})


def test_the_pointer_never_moves_back(uri: str, folder: Path) -> None:
    store = WeightStore(uri)
    for version in (0, 5, 3):
        store.publish(version, folder, metadata={})
    latest = store.latest()
    assert latest is not None
    assert latest.version == 5
    assert store.versions() == [0, 3, 5]


@pytest.mark.parametrize("pointer", [None, b"", b"nonsense", b"v000099", b"\xff\xfe"])
def test_without_a_usable_pointer_the_highest_version_is_the_latest(
    uri: str, folder: Path, pointer: bytes | None
) -> None:
    store = WeightStore(uri)
    for version in (1, 2):
        store.publish(version, folder, metadata={})
    fs, path = path_of(uri, "LATEST")
    if pointer is None:
        fs.rm(path)
    else:
        fs.pipe_file(path, pointer)
    assert store.latest() == store.manifest(2)


def test_publishing_again_moves_a_pointer_that_a_crash_left_behind(uri: str, folder: Path) -> None:
    store = WeightStore(uri)
    for version in (1, 2):
        store.publish(version, folder, metadata={})
    overwrite(uri, "LATEST", b"v000001\n")
    assert store.latest() == store.manifest(1)
    store.publish(2, folder, metadata={})
    assert store.latest() == store.manifest(2)


def test_a_version_without_manifest_does_not_exist_and_is_replaced(
    uri: str, folder: Path, tmp_path: Path
) -> None:
    store = WeightStore(uri)
    store.publish(1, folder, metadata={})
    overwrite(uri, "v000002/leftover.safetensors", b"half")
    assert store.versions() == [1]
    with pytest.raises(FileNotFoundError, match="no weights of version 2"):
        store.fetch(2, tmp_path / "cache")
    store.publish(2, folder, metadata={})
    assert contents(store.fetch(2, tmp_path / "cache")) == contents(folder)
    fs, path = path_of(uri, "v000002/leftover.safetensors")
    assert not fs.exists(path)


def test_a_damaged_manifest_is_named_and_passed_over(uri: str, folder: Path) -> None:
    store = WeightStore(uri)
    for version in (1, 2):
        store.publish(version, folder, metadata={})
    overwrite(uri, "v000002/manifest.json", b'{"version": 2')
    with pytest.raises(ValueError, match=r"v000002/manifest\.json is damaged"):
        store.manifest(2)
    with structlog.testing.capture_logs() as logs:
        assert store.latest() == store.manifest(1)
    assert {entry["version"] for entry in logs} == {2}


@pytest.mark.parametrize("content", [b"weightz" * 1000, b"weights", None])
def test_a_bad_file_is_never_fetched(uri: str, folder: Path, tmp_path: Path, content: bytes | None) -> None:
    store, cache = WeightStore(uri), tmp_path / "cache"
    store.publish(1, folder, metadata={})
    if content is None:
        fs, path = path_of(uri, "v000001/model.safetensors")
        fs.rm(path)
    else:
        overwrite(uri, "v000001/model.safetensors", content)
    with pytest.raises(DigestMismatch, match=r"model\.safetensors"):
        store.fetch(1, cache)
    assert list(cache.iterdir()) == []


@pytest.mark.parametrize("name", ["../evil", "/etc/evil", "a/../../evil", "manifest.json", "", "..\\evil"])
def test_a_manifest_cannot_name_files_outside_its_folder(name: str) -> None:
    raw = {"version": 1, "files": {name: {"sha256": "0", "size": 0}}, "metadata": {}, "created_at": 0.0}
    with pytest.raises(ValueError, match="cannot hold a file"):
        Manifest.from_json(json.dumps(raw).encode())


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@given(st.integers(0, 10**9), st.dictionaries(st.text(max_size=5), JSON, max_size=3), st.floats(0, 1e12))
def test_a_manifest_survives_json(version: int, metadata: dict[str, object], created_at: float) -> None:
    manifest = Manifest(version, {"a/b": FileEntry("ab", 3)}, metadata, created_at)
    assert Manifest.from_json(manifest.to_json()) == manifest


@given(st.binary(max_size=30) | JSON.map(lambda value: json.dumps(value).encode()))
def test_anything_else_is_no_manifest(content: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - any of them
        Manifest.from_json(content)


def test_a_fetched_version_is_used_again(uri: str, folder: Path, tmp_path: Path) -> None:
    store, cache = WeightStore(uri), tmp_path / "cache"
    store.publish(1, folder, metadata={})
    inode = (store.fetch(1, cache) / "model.safetensors").stat().st_ino
    overwrite(uri, "v000001/model.safetensors", b"not read again")
    assert (store.fetch(1, cache) / "model.safetensors").stat().st_ino == inode


def test_a_cached_version_of_another_run_is_replaced(folder: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    WeightStore(tmp_path / "first").publish(1, folder, metadata={})
    WeightStore(tmp_path / "first").fetch(1, cache)
    (folder / "model.safetensors").write_bytes(b"WEIGHTS" * 1000)
    second = WeightStore(tmp_path / "second")
    second.publish(1, folder, metadata={})
    assert contents(second.fetch(1, cache)) == contents(folder)
    assert [path.name for path in cache.iterdir()] == ["v000001"]


def test_a_cached_version_that_lost_something_is_replaced(folder: Path, tmp_path: Path) -> None:
    store, cache = WeightStore(tmp_path / "store"), tmp_path / "cache"
    store.publish(1, folder, metadata={})
    (store.fetch(1, cache) / "model.safetensors").write_bytes(b"")
    assert contents(store.fetch(1, cache)) == contents(folder)
    (cache / "v000001" / "manifest.json").unlink()
    assert contents(store.fetch(1, cache)) == contents(folder)


def test_downloads_of_dead_processes_are_removed_from_the_cache(folder: Path, tmp_path: Path) -> None:
    store, cache = WeightStore(tmp_path / "store"), tmp_path / "cache"
    store.publish(1, folder, metadata={})
    for name, age in (("dead", 7200), ("alive", 0)):
        download = cache / f".v000001.{name}.tmp"
        download.mkdir(parents=True)
        (download / "part").write_bytes(b"half")
        for path in (download / "part", download):
            os.utime(path, (time.time() - age, time.time() - age))
    store.fetch(1, cache)
    assert sorted(path.name for path in cache.iterdir()) == [".v000001.alive.tmp", "v000001"]


def test_prune_keeps_the_newest(uri: str, folder: Path) -> None:
    store = WeightStore(uri)
    assert store.prune(1) == []
    for version in range(5):
        store.publish(version, folder, metadata={})
    assert store.prune(2) == [0, 1, 2]
    assert store.versions() == [3, 4]
    assert store.prune(2) == []
    with pytest.raises(ValueError, match="at least 1"):
        store.prune(0)


def test_prune_never_deletes_the_latest(uri: str, folder: Path) -> None:
    store = WeightStore(uri)
    for version in range(4):
        store.publish(version, folder, metadata={})
    overwrite(uri, "LATEST", b"v000001\n")
    assert store.prune(1) == [0, 2]
    assert store.versions() == [1, 3]


def test_prune_removes_what_a_crash_left_but_not_what_is_being_published(uri: str, folder: Path) -> None:
    store = WeightStore(uri)
    store.publish(2, folder, metadata={})
    overwrite(uri, "v000001/model.safetensors", b"half")
    overwrite(uri, "v000003/model.safetensors", b"half")
    assert store.prune(1) == []
    fs, root = path_of(uri, "")
    assert sorted(name.rstrip("/").rpartition("/")[2] for name in fs.ls(root, detail=False)) == [
        "LATEST",
        "v000002",
        "v000003",
    ]


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(0, 6), max_size=8), st.integers(1, 4))
def test_any_order_of_publishing_keeps_the_highest_as_the_latest(
    folder: Path, versions: list[int], keep: int
) -> None:
    store = WeightStore(f"memory://{time.time_ns()}")
    for version in versions:
        store.publish(version, folder, metadata={})
    store.prune(keep)
    latest = store.latest()
    assert store.versions() == sorted(set(versions))[-keep:]
    assert (latest.version if latest else None) == max(versions, default=None)


def test_killing_a_publisher_at_any_moment_leaves_only_whole_versions(
    tmp_path: Path, run_and_kill: Callable[..., list[str]]
) -> None:
    store, highest = WeightStore(tmp_path / "store"), -1
    for lines, after in ((1, 0.004), (3, 0.013), (2, 0.07)):
        arguments = (str(tmp_path / "store"), str(tmp_path / "work"))
        printed = run_and_kill(PUBLISH_FOREVER, *arguments, lines=lines, after=after)
        latest = store.latest()
        assert latest is not None
        assert highest < int(printed[-1]) <= latest.version <= int(printed[-1]) + 1  # published is never lost
        highest = latest.version
        versions = store.versions()
        assert highest in versions
        assert len(versions) <= 5  # three kept, one published since, one perhaps not yet pruned
        for version in versions:
            expected = {f"part{i}": bytes([version % 251, i]) * 40_000 for i in range(3)}
            assert contents(store.fetch(version, tmp_path / "cache")) == expected
            assert store.manifest(version).metadata == {"version": version}
