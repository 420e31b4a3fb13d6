"""The whole rollout process on inference servers, from the first weights to the last."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from pydantic import ValidationError
from safetensors.numpy import save_file

from hintloop.agent.policy import load_renderer
from hintloop.envs.registry import load_taskset
from hintloop.replay.journal import Journal
from hintloop.replay.weights import WeightStore
from hintloop.rollout.config import EvaluationConfig, RolloutConfig, TeachersConfig
from hintloop.rollout.engines.publish_adapter import FOLDER
from hintloop.rollout.engines.sim import SimEngine
from hintloop.rollout.engines.sim_plan import Fault, Plan
from hintloop.rollout.engines.sim_server import in_thread
from hintloop.rollout.engines.vllm import Patience
from hintloop.rollout.loading import ROSTER
from hintloop.rollout.run import run_rollout

pytestmark = pytest.mark.usefixtures("within_time")
LAST = 3
"""The last version, or a later one where faults are still to come then."""
LEARNS_S = 180.0
_DROP = Fault(kind="drop", skip=1, times=3, tokens=4)
BREAK = ((_DROP, Fault(kind="error", skip=20, times=2), Fault(kind="stale_load", skip=1)), (_DROP,))
DELAY_AND_LIE = (
    (Fault(kind="hang", skip=2, tokens=2), Fault(kind="slow", skip=3, times=2, seconds=0.3)),
    (
        Fault(kind="mislabel", skip=2, times=2),
        Fault(kind="restart", skip=4, tokens=2, seconds=0.1),
        Fault(kind="mislabel", place="weight_info", skip=3),
        Fault(kind="hang", place="hintloop_fetch", skip=1),
    ),
)
"""What each of the two servers does. All of it is early: how long each one serves is a matter of luck."""


@pytest.fixture(scope="module")
def env_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    ready = tmp_path_factory.mktemp("env") / "url"
    command = [
        sys.executable,
        "-m",
        "hintloop.cli.main",
        "serve",
        "env",
        "--port",
        "0",
        "--max-sessions",
        "8",
    ]
    process = subprocess.Popen([*command, "--ready-file", str(ready)])
    try:
        deadline = time.monotonic() + 60
        while not ready.exists():
            assert process.poll() is None, "the environment server did not start"
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield ready.read_text().strip()
    finally:
        process.terminate()
        process.wait(30)


def publish(store: WeightStore, student: Path, made: Path, version: int, *, final: bool = False) -> None:
    shutil.copytree(student, made, dirs_exist_ok=True)
    (made / "config.json").write_text(json.dumps({"vocab_size": len(load_renderer(student).tokenizer)}))
    save_file({"weight": np.full((4, 4), version, np.float32)}, made / "model.safetensors")
    (made / FOLDER).mkdir(exist_ok=True)
    (made / FOLDER / "adapter_config.json").write_text(f'{{"r": {version + 1}}}')
    probe = {"token_ids": [1.0, 2.0, 3.0], "logprobs": [-1.0 - version, -2.0]}
    store.publish(version, made, metadata={"probe": probe, "final": final})


@pytest.mark.parametrize(
    ("weight_transfer", "faults"),
    [("fetch", BREAK), ("adapter", BREAK), ("direct", BREAK), ("fetch", DELAY_AND_LIE)],
    ids=["fetch", "adapter", "direct", "fetch-late-or-lying"],
)
def test_a_run_on_servers_that_fail_goes_on_to_its_end(
    env_url: str,
    student_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    weight_transfer: Literal["fetch", "adapter", "direct"],
    faults: Sequence[tuple[Fault, ...]],
) -> None:
    short = partial(Patience, first=2.0, stall=2.0, control=2.0, lag=5.0)
    monkeypatch.setattr("hintloop.rollout.engines.vllm.Patience", short)
    store, journal = WeightStore(tmp_path / "weights"), Journal(tmp_path / "journal")
    publish(store, student_folder, tmp_path / "made", 0)

    size = len(load_renderer(student_folder).tokenizer)
    plans = [Plan(fault=some, stop_after=6, vocabulary=size) for some in faults]
    engines = [SimEngine(plan, cache=tmp_path / f"cache{place}") for place, plan in enumerate(plans)]
    last = 0

    def to_come() -> list[str]:
        return [f"{fault['kind']} {fault['place']}" for engine in engines for fault in engine.faults.left()]

    def learn() -> None:
        nonlocal last
        deadline, final = time.monotonic() + LEARNS_S, False
        while not final:
            while len(journal.segments()) <= last and time.monotonic() < deadline:
                time.sleep(0.02)
            last += 1
            final = (last >= LAST and not to_come()) or time.monotonic() > deadline
            publish(store, student_folder, tmp_path / "made", last, final=final)

    learner = threading.Thread(target=learn)
    with contextlib.ExitStack() as stack:
        urls = [stack.enter_context(in_thread(engine)) for engine in engines]
        (tmp_path / ROSTER).write_text("\n".join(urls))
        learner.start()
        summary = run_rollout(
            run_dir=tmp_path,
            journal_uri=str(tmp_path / "journal"),
            weights_uri=str(tmp_path / "weights"),
            env_url=env_url,
            splits={name: list(ids) for name, ids in load_taskset("bugfix").splits().items()},
            model="student",
            env="coding",
            seed=1,
            config=RolloutConfig(
                engines=tuple(urls[:1]),
                weight_transfer=weight_transfer,
                group_size=2,
                groups_per_step=1,
                episodes_in_flight=4,
                max_new_tokens=8,
                max_tokens=900,
                poll_s=0.02,
                idle_timeout_s=60.0,
            ),
            evaluation=EvaluationConfig(splits=("heldfn",), num_tasks=2, temperatures=(1.0,), in_flight=2),
            teachers=TeachersConfig(),
        )
        learner.join()
    assert (summary.stopped, summary.version, summary.lost, to_come()) == ("final", last, {}, [])
    for episode in journal.reader().poll():
        assert all(
            (logprob < 0) == (version >= 0) == bool(mask)
            for logprob, version, mask in zip(
                episode.logprobs, episode.policy_versions, episode.loss_mask, strict=True
            )
        )
    status = json.loads((tmp_path / "status" / "rollout.json").read_text())
    assert {server["url"] for server in status["servers"]} == set(urls)
    assert all(engine.sampled > 0 for engine in engines)
    assert status["engine"]["retries"] > 0
    # Of the later versions the rollout process itself reads the manifest only, unless it sends them.
    newest = max((tmp_path / "cache" / "weights").glob("v*"))
    names = {path.name for path in newest.iterdir()}
    assert (names == {"manifest.json"}) == (weight_transfer != "direct")
    assert ("model.safetensors" in names) == (weight_transfer == "direct")


def test_an_engine_that_is_no_url_is_refused() -> None:
    with pytest.raises(ValidationError, match="no URL such as"):
        RolloutConfig(engines=("127.0.0.1:8000",))
