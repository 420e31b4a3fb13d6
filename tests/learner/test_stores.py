"""Journal and weights on any filesystem: in memory, and on a real S3-compatible server."""

from __future__ import annotations

from pathlib import Path
from uuid import uuid4

from safetensors.torch import load_file

from hintloop.learner.config import LearnerConfig
from hintloop.learner.run import run_learner
from hintloop.replay.journal import Journal
from hintloop.replay.weights import WeightStore

from .factory import make_groups, save_student

CONFIG = LearnerConfig(groups_per_step=2, micro_batches=2, max_staleness=None)


def train_on(uri: str, folder: Path) -> dict[str, object]:
    """Train on a journal at ``uri`` in two runs, the second one a resume; the last weights, by name."""
    writer = Journal(f"{uri}/journal").writer("w")
    for group in make_groups(6, 2, sites=1, pairs=1):
        writer.append(group)
    student = save_student(folder / "student")
    for steps in (2, 3):
        summary = run_learner(
            student,
            f"{uri}/journal",
            f"{uri}/weights",
            folder / "run",
            CONFIG.model_copy(update={"steps": steps}),
            follow=False,
        )
    assert (summary.step, summary.reason) == (3, "steps")
    assert summary.counts["episodes"] == 12
    assert summary.counts["sites"] == 12
    store = WeightStore(f"{uri}/weights")
    latest = store.latest()
    assert latest is not None
    assert latest.metadata["final"]
    return dict(load_file(store.fetch(latest.version, folder / "cache") / "model.safetensors"))


def test_the_weights_do_not_depend_on_where_journal_and_weights_are(bucket: str, tmp_path: Path) -> None:
    uris = {"local": str(tmp_path / "store"), "memory": f"memory://{uuid4().hex}", "s3": bucket}
    local, memory, s3 = (train_on(uri, tmp_path / name) for name, uri in uris.items())
    assert local.keys() == memory.keys() == s3.keys()
    for name, tensor in local.items():
        assert tensor.equal(memory[name])  # type: ignore[attr-defined]
        assert tensor.equal(s3[name])  # type: ignore[attr-defined]
