"""Who trains which groups: all of them once, whoever dies and whatever order the journal shows."""

from __future__ import annotations

import json
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from hintloop.learner.config import LearnerConfig
from hintloop.learner.models import SideWeights, make_optimizer
from hintloop.learner.ranks import Trained
from hintloop.learner.replicas.config import ReplicasConfig
from hintloop.learner.replicas.manager import StoreManager
from hintloop.learner.replicas.replica import Replica
from hintloop.learner.replicas.share import OrderedJournal, ShareSource
from hintloop.learner.replicas.state import from_bytes, to_bytes
from hintloop.learner.replicas.store import ObjectStoreAllReduce
from hintloop.learner.run import run_learner
from hintloop.learner.source import GroupSource, ReadableJournal
from hintloop.replay.episode import Episode
from hintloop.replay.journal import Journal, Segment
from hintloop.replay.weights import WeightStore

from .factory import make_groups, save_student, tiny_model


def write(folder: Path, count: int, *, writer: str = "w", per_segment: int = 2, seed: int = 0) -> Journal:
    journal = Journal(folder)
    made = journal.writer(writer)
    groups = make_groups(count, 1, seed=seed)
    for start in range(0, count, per_segment):
        made.append([e for group in groups[start : start + per_segment] for e in group])
    return journal


def opener(journal: ReadableJournal, **options: Any) -> Callable[..., GroupSource]:
    return lambda position, seen: GroupSource(
        journal, position=position, seen=seen, **{"follow": False, **options}
    )


def names(groups: list[list[Any]]) -> list[str]:
    return [group[0].group_id for group in groups]


class Memory:
    """A complete journal of one group per segment, without files."""

    uri = "memory"

    def __init__(self, groups: list[list[Episode]], position: int = 0) -> None:
        self._groups, self._next = groups, position
        self.damaged: list[str] = []

    @property
    def position(self) -> dict[str, int]:
        return {"w": self._next}

    def reader(self, position: Mapping[str, int] | None = None) -> Memory:
        return Memory(self._groups, (position or {}).get("w", 0))

    def read(self, segment: str) -> list[Episode]:
        return self._groups[int(segment)]

    def poll_segment(self) -> Segment | None:
        if self._next == len(self._groups):
            return None
        self._next += 1
        return Segment(str(self._next - 1), self._groups[self._next - 1], self.position)


GROUPS = make_groups(24, 1)
NEWEST = "checkpoints/v000002/model"


@given(data=st.data())
def test_every_group_enters_one_average_once_whoever_comes_and_goes(
    data: st.DataObject,
) -> None:
    """Replicas as a model: each round some die before it ends, some come back, and some averages fail."""
    journal = Memory(GROUPS)
    open_source = opener(journal)
    live = {index: ShareSource(open_source, journal, index, (0, 1, 2)) for index in range(3)}
    done: Counter[str] = Counter()
    late: dict[int, list[str]] = {}
    for _ in range(15):
        members = next(iter(live.values())).members
        trained = {index: late.get(index, []) for index in live}
        for _ in range(data.draw(st.integers(1, 2), "steps")):
            for index, source in live.items():
                trained[index] += names(source.take(2))
        dead = data.draw(st.sets(st.sampled_from(sorted(live)), max_size=len(live) - 1), "dead")
        for index in dead:
            del live[index]
        joined = data.draw(st.sets(st.sampled_from([i for i in range(4) if i not in live] or [9])), "joined")
        donor = next(iter(live.values()))
        contributors = tuple(index for index in sorted(live) if index in members)
        for index in joined - {9}:
            live[index] = ShareSource(open_source, journal, index, (0, 1, 2))
            live[index].load(from_bytes(to_bytes(donor.state())))
        committed = data.draw(st.booleans(), "committed") if data.draw(st.booleans()) else True
        for source in live.values():
            source.close(tuple(sorted(live)), contributors)
        on_its_way = data.draw(st.booleans(), "a step while the average is on its way")
        late = {index: names(source.take(2)) if on_its_way else [] for index, source in live.items()}
        for source in live.values():
            source.settle(committed)
        if committed:
            done.update(name for index in contributors for name in trained[index])
        else:
            late = {}
        states = [source.state() for source in live.values()]
        assert all(state == states[0] for state in states), "all know the same"
        assert max(done.values(), default=1) == 1
        if not any(late.values()) and all(source.at_end() for source in live.values()):
            assert done.keys() == {f"g{number}" for number in range(24)}
            break


def test_a_share_goes_round_the_members_and_a_dead_ones_comes_back_first(tmp_path: Path) -> None:
    journal = write(tmp_path, 12)
    source = ShareSource(opener(journal), journal, 5, (2, 5, 7))
    assert names(source.take(2)) == ["g1", "g4"]
    source.close((2, 5), (2, 5))
    source.settle(True)
    assert names(source.take(1)) == ["g5"], "g2 and g5 were the dead one's"
    assert not source.at_end()
    assert names(source.take(3)) == ["g7", "g9", "g11"]
    assert source.at_end()
    source.close((2, 5), (2, 5))
    source.settle(False)
    assert not source.at_end()
    assert names(source.take(4)) == ["g5", "g7", "g9", "g11"], "nothing of it had counted"


def test_readers_of_a_growing_journal_agree_on_an_order(tmp_path: Path) -> None:
    plain = Journal(tmp_path / "journal")
    first, second = (OrderedJournal(Journal(tmp_path / "journal"), tmp_path / "log") for _ in range(2))
    one, two = first.reader(), second.reader()
    seen: list[list[str]] = [[], []]

    def poll(number: int) -> None:
        while segment := (one, two)[number].poll_segment():
            seen[number].append(segment.name)

    for number, name in enumerate("bab"):
        write(tmp_path / "journal", 2, writer=name, per_segment=1, seed=number)
        poll(number % 2)
    poll(0)
    poll(1)
    assert seen[0] == seen[1]
    assert sorted(seen[0]) == sorted(plain.segments())
    assert seen[0] != plain.segments(), "who comes late finds another order, without a log"
    again = first.reader({"entries": 3})
    rest = []
    while segment := again.poll_segment():
        rest.append(segment.name)
    assert rest == seen[0][3:]
    assert again.position == one.position == {"entries": 6}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "give one of the two"),
        ({"lighthouse": "http://x", "rounds": "y"}, "give one of the two"),
        ({"rounds": "y", "index": 2}, "cannot join"),
        ({"lighthouse": "http://x", "sync_every": 5, "fragments": 2}, "multiple of fragments"),
        ({"lighthouse": "http://x", "sync_every": 4, "fragments": 2, "fragment_sync_delay": 2}, "below"),
        ({"lighthouse": "http://x", "outer_momentum": 0.0}, "nesterov"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ReplicasConfig(count=2, **settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"steps": 7}, "multiple of replicas.sync_every"),
        ({"max_minutes": 1.0}, "no common clock"),
        ({"publish_every": 2}, "every round"),
        ({"average_last": True}, "another moving average"),
    ],
)
def test_learner_settings_that_replicas_cannot_have_are_refused(
    tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    replicas = ReplicasConfig(count=1, rounds=str(tmp_path / "rounds"), sync_every=2)
    learner = LearnerConfig(**{"steps": 4, **settings})
    with pytest.raises(ValueError, match=message):
        Replica(replicas, learner, WeightStore(tmp_path / "weights"), tmp_path / "run")


def test_every_setting_of_replicas_is_described() -> None:
    assert all(field.description for field in ReplicasConfig.model_fields.values())


def test_what_a_healed_replica_takes_over_is_all_that_training_changes(tmp_path: Path) -> None:
    config = LearnerConfig()
    ours, theirs = tiny_model(0), tiny_model(1)
    made = [
        Trained(model, make_optimizer(model, config), SideWeights.of(model, config).teacher)
        for model in (ours, theirs)
    ]
    for parameter in theirs.parameters():
        parameter.grad = parameter.detach().clone()
    made[1].optimizer[0].step()
    made[1].optimizer[1].step()
    made[0].load(from_bytes(to_bytes(made[1].state())))
    assert to_bytes(made[0].state()) == to_bytes(made[1].state())


def replicated(
    folder: Path, steps: int, *, count: int = 1, index: int = 0, run: str = "run", **replicas: Any
) -> Any:
    """One replica, alone unless there are others, in a folder of rounds."""
    return run_learner(
        folder / "student",
        str(folder / "journal"),
        str(folder / "weights"),
        folder / run,
        LearnerConfig(steps=steps, groups_per_step=2, micro_batches=1, max_staleness=None),
        follow=False,
        replicas=ReplicasConfig(count=count, index=index, rounds=str(folder / "rounds"), **replicas),
    )


def one_of_two(folder: Path, steps: int, index: int, **replicas: Any) -> Any:
    options = {"count": 2, "index": index, "run": f"replica-{index}", "round_timeout_s": 120.0, **replicas}
    return replicated(folder, steps, **options)


def await_waiting(folder: Path) -> None:
    """Until the first of two replicas waits for the second."""
    status, deadline = folder / "replica-0" / "status" / "learner.json", time.monotonic() + 60
    while not status.exists() or json.loads(status.read_text())["state"] != "waiting for replica 1":
        assert time.monotonic() < deadline
        time.sleep(0.02)


def both(folder: Path, steps: int, **replicas: Any) -> None:
    """Two replicas until they have done the steps. The first waits for the second: loading is not for two threads."""
    with ThreadPoolExecutor(1) as thread:
        first = thread.submit(one_of_two, folder, steps, 0, **replicas)
        await_waiting(folder)
        assert one_of_two(folder, steps, 1, **replicas).reason == "steps"
        assert first.result(60).reason == "steps"


def test_a_round_is_a_version_and_the_last_one_is_filled_up(tmp_path: Path) -> None:
    save_student(tmp_path / "student")
    write(tmp_path / "journal", 10)
    assert replicated(tmp_path, 4, sync_every=2).reason == "steps"
    summary = replicated(tmp_path, 100, sync_every=2)
    assert (summary.reason, summary.step, summary.version, summary.episodes) == ("journal_end", 6, 3, 10)
    store = WeightStore(tmp_path / "weights")
    assert [store.manifest(version).metadata["step"] for version in store.versions()] == [0, 2, 4, 6]
    assert store.manifest(3).metadata["final"]


def test_of_a_streamed_model_what_all_have_in_common_is_published(tmp_path: Path) -> None:
    save_student(tmp_path / "student")
    write(tmp_path / "journal", 16)
    streaming: dict[str, Any] = {
        "sync_every": 4,
        "fragments": 2,
        "fragment_sync_delay": 1,
        "fragment_update_alpha": 0.5,
    }
    assert replicated(tmp_path, 4, **streaming).version == 1
    summary = replicated(tmp_path, 8, **streaming)
    assert (summary.step, summary.version, summary.reason) == (8, 2, "steps")
    newest = tmp_path / "run" / "checkpoints" / "v000002"
    assert (newest / "published" / "model.safetensors").exists()
    outer = from_bytes((tmp_path / "run" / "outer" / "v000002.safetensors").read_bytes())
    assert outer["manager"] == {"step": 4}


def test_a_run_folder_that_is_no_replicas_is_refused(tmp_path: Path) -> None:
    save_student(tmp_path / "student")
    write(tmp_path / "journal", 4)
    replicated(tmp_path, 2, sync_every=2)
    (tmp_path / "run" / "outer" / "v000001.safetensors").unlink()
    with pytest.raises(ValueError, match="no outer state of version 1"):
        replicated(tmp_path, 4, sync_every=2)


@pytest.mark.parametrize(
    "schedule",
    [
        {"sync_every": 2},
        {"sync_every": 4, "fragments": 2, "fragment_sync_delay": 1, "fragment_update_alpha": 0.5},
    ],
)
def test_sigterm_ends_a_wait_for_other_replicas_and_the_round_goes_on_later(
    tmp_path: Path, schedule: dict[str, Any]
) -> None:
    """One of two is stopped while it waits in the second round; both end where they would have without that."""
    every, kept = schedule["sync_every"], []
    for name in ("whole", "stopped"):
        folder = tmp_path / name
        save_student(folder / "student")
        write(folder / "journal", 8 * every)
        if name == "stopped":
            both(folder, every, **schedule)
            summary, seconds = stopped_while_waiting(folder, 2 * every, **schedule)
            assert (summary.reason, summary.step, summary.version) == ("signal", every, 1)
            assert seconds < 100, "of the two minutes that a round may take"
            rounds = sorted(path.name for path in (folder / "rounds").iterdir())
            given = [path.name for path in (folder / "rounds" / rounds[-1]).iterdir()]
            assert given == ["rank-0-of-2.safetensors"]
        both(folder, 2 * every, **schedule)
        kept.append([load_file(folder / f"replica-{i}" / NEWEST / "model.safetensors") for i in range(2)])
    for undisturbed, stopped in zip(*kept, strict=True):
        assert all(value.equal(stopped[name]) for name, value in undisturbed.items())


def test_a_replica_that_is_told_to_stop_leaves_the_last_version_to_those_before_it(tmp_path: Path) -> None:
    for index in range(2):
        config = ReplicasConfig(count=2, index=index, rounds=str(tmp_path / "rounds"), sync_every=2)
        weights = WeightStore(tmp_path / "weights")
        replica = Replica(config, LearnerConfig(), weights, tmp_path / "run", lambda: True)
        replica._manager = StoreManager(ObjectStoreAllReduce(tmp_path / "rounds", index, 2))
        assert replica.publishes_last(1) == (index == 0)


def stopped_while_waiting(folder: Path, steps: int, **replicas: Any) -> tuple[Any, float]:
    """How the first of two replicas ends that gets SIGTERM when it waits for the other, and how soon."""

    def stop_when_waiting() -> float:
        await_waiting(folder)
        os.kill(os.getpid(), signal.SIGTERM)
        return time.monotonic()

    with ThreadPoolExecutor(1) as thread:
        sent = thread.submit(stop_when_waiting)
        summary = one_of_two(folder, steps, 0, **replicas)
        return summary, time.monotonic() - sent.result()
