"""Pairs for an episode that is in the journal: their own episode, and keys that tell what was asked about."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from hintloop.replay.episode import Episode, Outcome, PreferencePair, Turn
from hintloop.replay.supplement import is_supplement, state_keys, supplement

TURNS = (
    Turn("user", 0, 0, "go"),
    Turn("assistant", 0, 0, "a"),
    Turn("tool", 0, 0, "1", "f", "{}"),
    Turn("tool", 0, 0, "2", "g", "{}"),
    Turn("assistant", 0, 0, "b"),
    Turn("tool", 0, 0, "3", "f", "{}"),
    Turn("assistant", 0, 0, "c"),
)


def pair(turn: int, chosen: str = "f {}") -> PreferencePair:
    return PreferencePair(turn, 0, (), (), chosen, "own", 1, 1, False, ("t",))


def test_a_supplement_ends_with_its_last_pair_and_never_votes(make_episode: Callable[..., Episode]) -> None:
    episode = replace(make_episode(0), turns=TURNS)
    made = supplement(episode, [pair(1), pair(4)])
    assert is_supplement(made)
    assert not is_supplement(episode)
    assert made.turns == TURNS[:6]
    assert supplement(episode, [pair(1)]).turns == TURNS[:4]
    assert (made.outcome, made.reward, made.reward_parts, made.hint_sites) == (Outcome.UNGRADED, None, {}, ())
    assert made.task_id == episode.task_id
    assert made.group_id not in (episode.group_id, episode.episode_id)


def test_equal_pairs_have_one_id_and_others_another(make_episode: Callable[..., Episode]) -> None:
    episode = replace(make_episode(0), turns=TURNS)
    ids = {
        supplement(episode, pairs).episode_id
        for pairs in ([pair(1)], [pair(1)], [pair(4)], [pair(1, "g {}")])
    }
    assert len(ids) == 3


def test_a_key_is_of_what_was_known_and_done_and_not_of_what_came_of_it() -> None:
    keys = state_keys(TURNS)
    assert list(keys) == [1, 4, 6]
    assert len(set(keys.values())) == 3
    assert state_keys(TURNS[:4]) == {1: keys[1]}
    other_result = (*TURNS[:2], replace(TURNS[2], text="other"), *TURNS[3:])
    assert state_keys(other_result)[1] == keys[1]
    assert state_keys(other_result)[4] != keys[4]
    other_call = (*TURNS[:2], replace(TURNS[2], tool_arguments='{"x":1}'), *TURNS[3:])
    assert state_keys(other_call)[1] != keys[1]
    assert state_keys((replace(TURNS[0], text="g"), replace(TURNS[1], text="oa"))) != state_keys(TURNS[:2])
