"""Readers that want only some episodes: what passes, and that a position does not depend on it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from hintloop.replay.episode import NOT_SAMPLED, Episode, Outcome
from hintloop.replay.filter import Filter
from hintloop.replay.journal import Journal

Make = Callable[[int], Episode]


@pytest.mark.parametrize(
    ("only", "passes"),
    [
        (Filter(), True),
        (Filter(sources=("codex", "rollout")), True),
        (Filter(sources=("codex",)), False),
        (Filter(outcomes=(Outcome.SOLVED,)), True),
        (Filter(outcomes=("failed", "truncated")), False),
        (Filter(tasks=("other/*", "bugfix/*")), True),
        (Filter(tasks=("bugfix",)), False),
        (Filter(models=("stud?nt",)), True),
        (Filter(models=("Student",)), False),
        (Filter(sources=("rollout",), models=("other",)), False),
    ],
)
def test_every_condition_must_hold(make_episode: Make, only: Filter, passes: bool) -> None:
    assert only.passes(make_episode(0)) is passes


@pytest.mark.parametrize(("version", "passes"), [(3, True), (5, True), (6, False), (9, False)])
def test_the_oldest_sampled_token_decides_about_the_lag(
    make_episode: Make, version: int, passes: bool
) -> None:
    episode = make_episode(0)
    assert min(each for each in episode.policy_versions if each != NOT_SAMPLED) == 3
    assert Filter(max_lag=2).passes(episode, version) is passes


def test_what_no_policy_sampled_has_no_lag(make_episode: Make) -> None:
    recorded = dataclasses.replace(make_episode(0), policy_versions=(NOT_SAMPLED,) * 4)
    assert Filter(max_lag=0).passes(recorded, 99)


def test_a_lag_needs_a_version_and_a_reader_without_one_stays_where_it_is(
    uri: str, make_episode: Make
) -> None:
    journal = Journal(uri)
    journal.writer("w").append([make_episode(0)])
    reader = journal.reader(only=Filter(max_lag=1))
    with pytest.raises(ValueError, match="max_lag needs the version"):
        reader.poll()
    assert reader.position == {}
    assert reader.poll(version=5) == []
    assert reader.position == {"w": 1}


def fill(journal: Journal, make_episode: Make) -> list[Episode]:
    """Segments of two episodes each, by two writers, of changing kinds."""
    made = []
    for number in range(0, 24, 2):
        values: dict[str, Any] = {
            "source": ("rollout", "codex", "evaluation")[number % 3],
            "task_id": ("bugfix/1", "exercism/2")[number // 8 % 2],
        }
        pair = [
            dataclasses.replace(make_episode(number), **values),
            dataclasses.replace(make_episode(number + 1), outcome=Outcome.FAILED, reward=0.0, **values),
        ]
        journal.writer("ab"[number // 2 % 2]).append(pair)
        made += pair
    return made


def test_readers_with_the_same_position_and_filter_get_the_same_segments(
    uri: str, make_episode: Make
) -> None:
    journal = Journal(uri)
    fill(journal, make_episode)
    only = Filter(sources=("rollout", "codex"), outcomes=("solved",))
    left, right = (journal.reader({"a": 1}, only) for _ in range(2))
    found = [left.poll_segment() for _ in range(7)]
    journal.compact()
    assert found == [right.poll_segment() for _ in range(7)]
    assert found[-2:] != [None, None]


def test_a_filter_takes_from_what_is_read_and_not_from_the_position(uri: str, make_episode: Make) -> None:
    journal = Journal(uri)
    made = fill(journal, make_episode)
    only = Filter(tasks=("exercism/*",))
    filtered, plain = journal.reader(only=only), journal.reader()
    assert filtered.poll() == [episode for episode in made if only.passes(episode)]
    assert len(plain.poll()) == len(made)
    assert filtered.position == plain.position


def test_a_segment_without_a_wanted_episode_is_passed_over(uri: str, make_episode: Make) -> None:
    journal = Journal(uri)
    fill(journal, make_episode)
    reader = journal.reader(only=Filter(models=("nobody",)))
    assert reader.poll_segment() is None
    assert reader.position == {"a": 6, "b": 6}
