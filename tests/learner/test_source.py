"""Groups from a journal: in order, once, and from an exact position."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path

import pytest

from hintloop.learner.source import GroupSource, IdleTimeout
from hintloop.replay.episode import Episode
from hintloop.replay.journal import Filter, Journal

from .factory import make_groups


def names(groups: list[list[Episode]]) -> list[str]:
    return [group[0].group_id for group in groups]


def write(folder: Path, groups: list[list[Episode]], per_segment: int = 1, writer: str = "w") -> Journal:
    journal = Journal(folder)
    out = journal.writer(writer)
    for start in range(0, len(groups), per_segment):
        out.append([e for group in groups[start : start + per_segment] for e in group])
    return journal


@pytest.mark.parametrize("per_segment", [1, 3, 7])
def test_a_position_continues_exactly_even_inside_a_segment(per_segment: int, tmp_path: Path) -> None:
    journal = write(tmp_path, make_groups(7, 2), per_segment)
    expected = [f"g{i}" for i in range(7)]
    for first in range(8):
        source = GroupSource(journal, follow=False)
        taken = names(source.take(first)) if first else []
        source.at_end()  # looking ahead changes nothing
        position = json.loads(json.dumps(source.position))
        rest = names(GroupSource(journal, position=position, follow=False).take(10))
        assert taken + rest == expected


def test_a_segment_that_comes_late_does_not_shift_a_position_inside_another(tmp_path: Path) -> None:
    journal = write(tmp_path, make_groups(3, 1), per_segment=3, writer="b")
    source = GroupSource(journal, follow=False)
    assert names(source.take(1)) == ["g0"]
    late = make_groups(5, 1)[3:]
    write(tmp_path, late, writer="a")
    resumed = GroupSource(journal, position=source.position, follow=False)
    assert names(resumed.take(10)) == ["g1", "g2", "g3", "g4"]


@pytest.mark.parametrize("per_segment", [1, 4])
def test_a_filter_passes_over_groups_and_a_position_does_not_depend_on_it(
    per_segment: int, tmp_path: Path
) -> None:
    groups = [
        [dataclasses.replace(e, source=("rollout", "codex")[number % 2]) for e in group]
        for number, group in enumerate(make_groups(6, 2))
    ]
    journal = write(tmp_path, groups, per_segment)
    source = GroupSource(journal, follow=False, only=Filter(sources=("codex",)))
    assert names(source.take(2)) == ["g1", "g3"]
    position = json.loads(json.dumps(source.position))
    assert names(source.take(9)) == ["g5"]
    assert (source.unwanted, source.repeated) == (3, 0)
    assert names(GroupSource(journal, position=position, follow=False).take(9)) == ["g4", "g5"]


def test_a_group_that_was_taken_is_not_taken_again(tmp_path: Path) -> None:
    groups = make_groups(3, 1)
    journal = write(tmp_path, [*groups, groups[1]])
    source = GroupSource(journal, follow=False, seen={"g0"})
    assert names(source.take(10)) == ["g1", "g2"]
    assert source.repeated == 2


def test_a_recorded_journal_is_read_as_often_as_asked_and_a_step_never_spans_two_passes(
    tmp_path: Path,
) -> None:
    journal = write(tmp_path, make_groups(3, 1))
    source = GroupSource(journal, follow=False, epochs=2)
    taken = []
    while groups := source.take(2):
        taken.append((source.epoch, names(groups), source.at_end()))
    assert taken == [
        (0, ["g0", "g1"], False),
        (0, ["g2"], False),
        (1, ["g0", "g1"], False),
        (1, ["g2"], True),
    ]


def test_a_live_journal_is_waited_for_and_given_up_after_the_timeout(tmp_path: Path) -> None:
    journal = write(tmp_path, make_groups(1, 1))
    waits: list[float] = []
    source = GroupSource(journal, follow=True, idle_timeout_s=0.3)
    with pytest.raises(IdleTimeout, match="no new group"):
        source.take(2, waiting=lambda: waits.append(time.monotonic()))
    assert waits
    assert not source.at_end()


def test_stopping_ends_the_wait_and_gives_nothing(tmp_path: Path) -> None:
    source = GroupSource(write(tmp_path, make_groups(1, 1)), follow=True)
    answers = iter([False, False, True])
    assert source.take(5, stop=lambda: next(answers)) == []
