"""A learner on a full disk: no step is lost, and the newest checkpoint and version stay good meanwhile."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from hintloop.learner import checkpoint as checkpoints
from hintloop.learner.config import LearnerConfig
from hintloop.learner.run import LearnerSummary, run_learner
from hintloop.replay.journal import Journal
from hintloop.replay.weights import WeightStore

from ..rollout.full_disk import full_disk
from .factory import make_groups, save_student

SETTINGS = LearnerConfig(steps=3, groups_per_step=2, micro_batches=1, max_staleness=None)


def learn(folder: Path, name: str) -> LearnerSummary:
    return run_learner(
        folder / "student",
        str(folder / "journal"),
        str(folder / name / "weights"),
        folder / name,
        SETTINGS,
        follow=False,
    )


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A student, a journal, and a run on it in the folder ``whole``."""
    folder = tmp_path_factory.mktemp("learner")
    save_student(folder / "student")
    writer = Journal(folder / "journal").writer("w")
    for group in make_groups(6, 2, sites=1, pairs=1):
        writer.append(group)
    assert learn(folder, "whole").version == 3
    return folder


def newest(run_dir: Path) -> Path:
    found = checkpoints.newest(run_dir / "checkpoints")
    assert found is not None
    return found.folder


@pytest.mark.parametrize("place", ["model.safetensors", "optimizer.pt", "publish"])
def test_a_full_disk_costs_no_step(undisturbed: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    whole, run_dir = undisturbed / "whole", undisturbed / place
    sizes = {path.name: path.stat().st_size for path in newest(whole).rglob("*")}
    room = sizes["model.safetensors" if place == "publish" else place] - 1
    store, struck = WeightStore(run_dir / "weights"), list[OSError]()
    owner: Any = WeightStore if place == "publish" else checkpoints
    name = "publish" if place == "publish" else "save"
    write, calls = getattr(owner, name), iter(range(10**6))

    def without_room(*args: Any, **kwargs: Any) -> Any:
        if next(calls) != 2:
            return write(*args, **kwargs)
        with full_disk(room), pytest.raises(OSError, match="File too large") as raised:
            write(*args, **kwargs)
        struck.append(raised.value)
        assert newest(run_dir).name == ("v000002" if place == "publish" else "v000001")
        latest = store.latest()
        assert latest is not None
        assert latest.version == 1
        assert store.versions() == [0, 1]
        store.fetch(1, run_dir / "fetched")  # checks all digests
        raise raised.value

    monkeypatch.setattr(owner, name, without_room)
    try:
        summary = learn(undisturbed, run_dir.name)
    except OSError:  # one line for the user, who makes room and starts it again
        summary = learn(undisturbed, run_dir.name)
    assert len(struck) == 1
    assert (summary.step, summary.version, summary.episodes) == (3, 3, 12)
    trained = [(each / "trained.jsonl").read_text() for each in (run_dir, whole)]
    assert trained[0] == trained[1]
    assert [json.loads(line)["step"] for line in trained[0].splitlines()] == [1, 2, 3]
    assert store.versions() == WeightStore(whole / "weights").versions()
    found, wanted = (load_file(newest(each) / "model" / "model.safetensors") for each in (run_dir, whole))
    assert all(found[each].equal(wanted[each]) for each in wanted)
    assert not list((run_dir / "checkpoints").glob(".*"))
