"""Averages over an object store and over a network, by four processes; and DiLoCo with them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torchft", reason="needs torchft, of the extra replicas")

from hintloop.learner.replicas.diloco import make_diloco_outer_loop, split_parameters
from hintloop.learner.replicas.lighthouse import open_lighthouse
from hintloop.learner.replicas.live import ReplicaManager, StateLost
from hintloop.learner.replicas.manager import MockManager, StoreManager
from hintloop.learner.replicas.state import from_bytes, to_bytes
from hintloop.learner.replicas.store import MissingRanks, ObjectStoreAllReduce, Stopped
from hintloop.learner.replicas.transport import SafetensorsTransport

from .outer import ROUNDS, SCHEDULES, contribution, inner_step, toy

TESTS = Path(__file__).parents[1]
DEADLINE_S = 900
COUNT = 4
TIMEOUT = timedelta(seconds=30)
PLACES = ("file", "s3")


@pytest.fixture(scope="module")
def lighthouse() -> Iterator[str]:
    with open_lighthouse(min_replicas=COUNT) as url:
        yield url


@pytest.fixture(scope="module")
def measured(lighthouse: str, bucket: str, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of four processes found."""
    out = tmp_path_factory.mktemp("outer")
    uris = [f"file://{out}/store", f"{bucket}/outer"]
    process = subprocess.Popen(
        [sys.executable, "-m", "learner.outer", str(out), str(COUNT), lighthouse, *uris],
        cwd=TESTS,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=DEADLINE_S)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, output[-3000:]
    return [torch.load(out / f"{i}.pt", weights_only=True) for i in range(COUNT)]


@pytest.mark.parametrize("place", PLACES)
def test_every_rank_gets_the_mean_of_all(measured: list[dict[str, Any]], place: str) -> None:
    given = [contribution(index) for index in range(COUNT)]
    for rank in measured:
        for found, parts in zip(rank[f"average {place}"], zip(*given, strict=True), strict=True):
            torch.testing.assert_close(found, torch.stack(parts).mean(0), atol=1e-6, rtol=0)
        same = zip(rank[f"average {place}"], measured[0][f"average {place}"], strict=True)
        assert all(mine.equal(first) for mine, first in same)


def test_old_rounds_are_removed(measured: list[dict[str, Any]], bucket: str, tmp_path: Path) -> None:
    import fsspec  # type: ignore[import-untyped]

    found = fsspec.filesystem("s3").ls(f"{bucket}/outer/plain")
    assert sorted(name.rsplit("/", 1)[1] for name in found) == ["round-00000001", "round-00000002"]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("place", [*PLACES, "gloo"])
def test_diloco_is_the_same_over_every_medium(
    measured: list[dict[str, Any]], schedule: str, place: str
) -> None:
    assert all(
        mine.equal(first)
        for rank in measured
        for mine, first in zip(rank[f"{schedule} {place}"], measured[0][f"{schedule} {place}"], strict=True)
    )
    for found, expected in zip(
        measured[0][f"{schedule} {place}"], measured[0][f"{schedule} file"], strict=True
    ):
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)


def test_diloco_is_what_its_paper_says(measured: list[dict[str, Any]]) -> None:
    """Written out: inner AdamW alone, then Nesterov SGD on the mean of what the replicas moved."""
    models = [toy() for _ in range(COUNT)]
    inner = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in models]
    shared = [p.detach().clone() for p in toy().parameters()]
    outer = torch.optim.SGD(shared, lr=0.7, momentum=0.9, nesterov=True)
    every = SCHEDULES["whole"]["sync_every"]
    for step in range(ROUNDS * every):
        for index, model in enumerate(models):
            inner_step(model, inner[index], index, step)
        if (step + 1) % every == 0:
            moved = zip(shared, *(list(model.parameters()) for model in models), strict=True)
            for value, *locals_ in moved:
                value.grad = value - torch.stack([p.detach() for p in locals_]).mean(0)
            outer.step()
            for model in models:
                for parameter, value in zip(model.parameters(), shared, strict=True):
                    parameter.data.copy_(value)
    for found, expected in zip(measured[0]["whole gloo"], shared, strict=True):
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)


def test_a_round_that_is_not_complete_in_time_names_who_is_missing(tmp_path: Path) -> None:
    waited: list[tuple[int, ...]] = []
    reduce = ObjectStoreAllReduce(tmp_path, 1, 4, timeout_s=0.05, poll_s=0.01, waiting=waited.append)
    ObjectStoreAllReduce(tmp_path, 3, 4)._put("round-00000007/rank-3-of-4.safetensors", [torch.ones(2)])
    with pytest.raises(MissingRanks, match=r"round 7 .*nothing from rank 0, 2 of 4") as caught:
        reduce.average(7, [torch.ones(2)])
    assert caught.value.ranks == (0, 2)
    assert set(waited) == {(0, 2)}


def test_a_rank_that_starts_again_in_mid_round_counts_once_with_what_it_first_gave(tmp_path: Path) -> None:
    with pytest.raises(MissingRanks):
        ObjectStoreAllReduce(tmp_path, 0, 2, timeout_s=0.01, poll_s=0.01).average(0, [torch.tensor(1.0)])
    again = ObjectStoreAllReduce(tmp_path, 0, 2, timeout_s=30.0, poll_s=0.01)
    results: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: results.extend(again.average(0, [torch.tensor(1.0001)])))
    thread.start()
    other = ObjectStoreAllReduce(tmp_path, 1, 2, timeout_s=30.0, poll_s=0.01)
    (mean,) = other.average(0, [torch.tensor(3.0)])
    thread.join(30.0)
    assert float(mean) == float(results[0]) == 2.0
    (late,) = other.average(0, [torch.tensor(9.0)])
    assert float(late) == 2.0, "a complete round can be read again"


def test_a_wait_ends_when_told_to_stop_and_what_was_given_stays_for_the_round(tmp_path: Path) -> None:
    waited: list[tuple[int, ...]] = []
    options: dict[str, Any] = {"timeout_s": 30.0, "poll_s": 0.01, "stopped": lambda: len(waited) == 3}
    with pytest.raises(Stopped, match="round 0"):
        ObjectStoreAllReduce(tmp_path, 0, 2, waiting=waited.append, **options).average(0, [torch.tensor(1.0)])
    assert waited == [(1,)] * 3
    other = ObjectStoreAllReduce(tmp_path, 1, 2, timeout_s=30.0, poll_s=0.01)
    (mean,) = other.average(0, [torch.tensor(3.0)])
    assert float(mean) == 2.0
    again = ObjectStoreAllReduce(tmp_path, 0, 2, **{**options, "stopped": lambda: True})
    (late,) = again.average(0, [torch.tensor(9.0)])
    assert float(late) == 2.0, "nothing is left to wait for"


def test_a_rank_with_a_state_that_is_too_old_is_refused(tmp_path: Path) -> None:
    alone = ObjectStoreAllReduce(tmp_path, 0, 1, keep=2)
    for number in range(5):
        alone.average(number, [torch.ones(1)])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["round-00000003", "round-00000004"]
    assert float(alone.average(3, [torch.ones(1)])[0]) == 1.0
    with pytest.raises(ValueError, match="is at round 4, and rank 0 comes with the state of round 2"):
        alone.average(2, [torch.ones(1)])


def test_ranks_that_disagree_are_told(tmp_path: Path) -> None:
    ObjectStoreAllReduce(tmp_path, 1, 3)._put("round-00000000/rank-1-of-3.safetensors", [torch.ones(2)])
    with pytest.raises(ValueError, match="rank 1 is one of 3, not of 2"):
        ObjectStoreAllReduce(tmp_path, 0, 2).average(0, [torch.ones(2)])
    ObjectStoreAllReduce(tmp_path, 1, 2)._put("round-00000001/rank-1-of-2.safetensors", [torch.ones(3)])
    with pytest.raises(ValueError, match="the tensors of rank 1 are not those of rank 0"):
        ObjectStoreAllReduce(tmp_path, 0, 2).average(1, [torch.ones(2)])
    with pytest.raises(ValueError, match="no such thing"):
        ObjectStoreAllReduce(tmp_path, 2, 2)


def test_the_store_manager_keeps_the_name_that_it_had_elsewhere(tmp_path: Path) -> None:
    assert MockManager is StoreManager
    with pytest.raises(ValueError, match="not quantised"):
        StoreManager(ObjectStoreAllReduce(tmp_path, 0, 1)).allreduce(torch.ones(1), should_quantize=True)


def test_what_torchft_would_do_wrong_without_a_word_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = toy()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    manager = StoreManager(ObjectStoreAllReduce(tmp_path, 0, 1))
    with pytest.raises(ValueError, match="in two fragments"):
        make_diloco_outer_loop(manager, [model, model[0]], optimizer)  # type: ignore[index]
    monkeypatch.setenv("TORCHFT_USE_BUCKETIZATION", "True")
    with pytest.raises(ValueError, match="lose tensors"):
        make_diloco_outer_loop(manager, [model], optimizer)


@given(sizes=st.lists(st.integers(1, 50), min_size=1, max_size=12), data=st.data())
def test_fragments_are_neighbours_that_are_all_there_once(sizes: list[int], data: st.DataObject) -> None:
    model = torch.nn.ParameterList(torch.zeros(size) for size in sizes)
    count = data.draw(st.integers(1, len(sizes)))
    fragments = [[name for name, _ in group.named_parameters()] for group in split_parameters(model, count)]
    assert len(fragments) == count
    assert all(fragments)
    assert [name for fragment in fragments for name in fragment] == [
        name for name, _ in model.named_parameters()
    ]
    with pytest.raises(ValueError, match="fragments"):
        split_parameters(model, len(sizes) + 1)


LEAVES = st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.floats(allow_nan=False) | st.text()


@given(
    st.recursive(
        LEAVES,
        lambda inner: st.lists(inner) | st.dictionaries(st.integers() | st.text(), inner),
        max_leaves=20,
    )
)
def test_a_state_survives_its_bytes(state: Any) -> None:
    assert from_bytes(to_bytes(state)) == state


def test_tensors_survive_and_what_could_run_code_is_refused() -> None:
    tied = torch.arange(6.0).reshape(2, 3)
    state = {"a": {0: tied, 1: (tied.T, tied.bfloat16())}, "step": torch.tensor(3.0)}
    found = from_bytes(to_bytes(state))
    assert found["a"][0].equal(tied)
    assert found["a"][1][0].equal(tied.T)
    assert found["a"][1][1].dtype is torch.bfloat16
    assert found["step"].shape == ()
    with pytest.raises(TypeError, match="a function cannot be part of a state"):
        to_bytes({"f": lambda: None})
    with pytest.raises(ValueError, match="not a state"):
        from_bytes(b"\x80\x04.")


def test_a_state_is_handed_over_even_to_who_asks_too_early() -> None:
    giver, taker = SafetensorsTransport("127.0.0.1"), SafetensorsTransport("127.0.0.1")
    state = {"user": {"learner": {"w": torch.arange(3.0)}}, "torchft": {"step": 7, "batches_committed": 9}}
    found: list[Any] = []
    address = giver.metadata()
    assert address.startswith("http://127.0.0.1:")
    early = threading.Thread(target=lambda: found.append(taker.recv_checkpoint(0, address, 7, TIMEOUT)))
    early.start()
    time.sleep(0.2)
    giver.send_checkpoint([1], 6, {"another": "step"}, TIMEOUT)
    giver.send_checkpoint([1], 7, state, TIMEOUT)
    early.join(30)
    assert to_bytes(found[0]) == to_bytes(state)
    giver.disallow_checkpoint()
    taker.shutdown()
    giver.shutdown()


def test_a_state_that_does_not_come_in_time_is_an_error() -> None:
    giver = SafetensorsTransport("127.0.0.1", timeout_s=0.1)
    giver.send_checkpoint([1], 7, {}, TIMEOUT)
    giver.disallow_checkpoint()
    for step in ("7", "8", "../etc", "-1"):
        with pytest.raises(OSError, match="404"):
            urllib.request.urlopen(f"{giver.metadata()}{step}", timeout=30).close()
    giver.shutdown()


@pytest.mark.filterwarnings("ignore:The 'warn' method is deprecated:DeprecationWarning")  # torchft's logging
def test_a_replica_that_is_alone_with_an_old_state_does_not_begin_again() -> None:
    with open_lighthouse() as url:
        manager = ReplicaManager(0, 3, url, floor=2)
        manager.register_state_dict_fn("nothing", lambda _: None, dict)
        with pytest.raises(
            StateLost, match="average 2 has been published, and no live replica has more than 0"
        ):
            manager.start_quorum()
        manager.load_state_dict({"step": 2, "batches_committed": 4})
        manager.start_quorum()
        assert manager.members == manager.contributors == (0,)
        value = torch.tensor(3.0)
        manager.allreduce(value).wait()
        assert manager.should_commit()
        assert (float(value), manager.current_step()) == (3.0, 3)
        manager.shutdown()
    with pytest.raises(ValueError, match="numbers from 0 to 1023, not 1024"):
        ReplicaManager(1024, 3, url)
