"""From episodes to rows and batches: which tokens, at which positions, with which denominators."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hintloop.learner.batch import BatchRules, StepBatch, build_step
from hintloop.learner.packing import Packed
from hintloop.learner.rows import group_advantages, hint_context, pair_context, policy_of, row_of
from hintloop.replay.episode import Episode, Outcome

from .factory import VOCABULARY, make_episode, make_groups

RULES = BatchRules(vocabulary=VOCABULARY, max_staleness=4)


def build(groups: list[list[Episode]], version: int = 0, **rules: int | None) -> StepBatch:
    return build_step(groups, replace(RULES, **rules), version=version, seed=(0, 0))


@given(seed=st.integers(0, 2**31), turns=st.integers(1, 5), hint=st.integers(0, 4), prompt=st.integers(1, 7))
@settings(max_examples=60, deadline=None)
def test_student_and_teacher_predict_the_same_tokens_of_the_failing_turn(
    seed: int, turns: int, hint: int, prompt: int
) -> None:
    episode = make_episode(
        "e", "g", np.random.default_rng(seed), turns=turns, prompt=prompt, sites=turns, hint_tokens=hint
    )
    policy = policy_of(episode, version=0, max_staleness=None)
    for site in episode.hint_sites:
        row = hint_context(episode, site, policy.fresh)
        assert row is not None
        ids = np.asarray(episode.token_ids)
        assert list(ids[row.student_index + 1]) == list(episode.token_ids[site.start : site.end])
        hinted = np.concatenate([row.prompt, row.hinted])
        assert list(hinted[row.teacher_index + 1]) == list(episode.token_ids[site.start : site.end])
        teacher_context = episode.token_ids[: site.insert_at] + site.hint_ids
        assert (
            tuple(hinted[: row.teacher_index[0] + 1])
            == teacher_context + episode.token_ids[site.insert_at : site.start]
        )
        assert len(row) == len(hinted) == site.end + hint


@given(rewards=st.lists(st.none() | st.floats(-2, 2), max_size=8))
def test_advantages_are_centred_and_ungraded_episodes_do_not_vote(rewards: list[float | None]) -> None:
    advantages = group_advantages(rewards)
    graded = [r for r in rewards if r is not None]
    assert group_advantages(graded) == [a for a in advantages if a is not None] or len(graded) < 2
    assert all(
        (a is None) == (r is None or len(graded) < 2) for a, r in zip(advantages, rewards, strict=True)
    )
    assert sum(a for a in advantages if a is not None) == pytest.approx(0.0, abs=1e-6)


def test_advantages_by_hand() -> None:
    high, low, none = group_advantages([1.0, 0.0, None])
    assert none is None
    assert high == pytest.approx(0.5 / (math.sqrt(0.5) + 1e-4))
    assert low == pytest.approx(-high if high else 0)
    assert group_advantages([1.0, None]) == [None, None]


def test_stale_and_unscored_tokens_are_masked_in_both_channels_and_counted() -> None:
    episode = make_episode("e", "g", np.random.default_rng(0), version=3, sites=1)
    site = episode.hint_sites[0]
    versions = list(episode.policy_versions)
    versions[site.start] = 1  # five behind version 6
    logprobs = list(episode.logprobs)
    logprobs[site.start + 1] = float("nan")
    episode = replace(episode, policy_versions=tuple(versions), logprobs=tuple(logprobs))
    policy = policy_of(episode, version=6, max_staleness=4)
    row = hint_context(episode, site, policy.fresh)
    assert row is not None
    assert list(row.student_index) == list(range(site.start, site.end - 1))
    assert not policy.scored[[site.start, site.start + 1]].any()
    other = make_episode("f", "g", np.random.default_rng(1), version=6, reward=0.0)
    batch = build([[episode, other]], version=6)
    assert batch.counts["tokens_stale"] == 1
    assert batch.counts["tokens_unscored"] == 1
    assert batch.counts["staleness_max"] == 5
    sampled = sum(episode.loss_mask) + sum(other.loss_mask)
    assert batch.totals.tokens == sampled - 2
    assert build([[episode, other]], version=6, max_staleness=None).totals.tokens == sampled - 1


def test_a_journal_newer_than_the_weights_is_not_stale() -> None:
    episode = make_episode("e", "g", np.random.default_rng(0), version=40)
    policy = policy_of(episode, version=0, max_staleness=0)
    assert policy.scored.sum() == sum(episode.loss_mask)


def test_rows_without_advantage_or_site_are_not_computed_but_count_in_the_denominator() -> None:
    same = make_groups(1, 3, rewards=(1.0,), seed=1)[0]
    mixed = make_groups(1, 2, seed=2)[0]
    batch = build([same, mixed])
    assert batch.counts["rows"] == 2
    assert batch.totals.rows == 5
    assert batch.totals.tokens == sum(sum(e.loss_mask) for e in same + mixed)
    with_site = replace(
        same[0], hint_sites=make_episode("x", "g", np.random.default_rng(1), sites=1).hint_sites
    )
    site_only = row_of(with_site, 0.0, policy_of(with_site, version=0, max_staleness=None))
    assert site_only is None


def test_a_site_keeps_the_row_of_an_episode_without_advantage_and_cuts_it_at_the_site() -> None:
    group = make_groups(1, 2, rewards=(0.0,), sites=1)[0]
    batch = build([group])
    (micro,) = batch.micro_batches
    assert len(micro.student) == 2
    assert not micro.trained.any()
    assert micro.student.ids.shape[1] == max(e.hint_sites[0].end - 1 for e in group)
    assert (
        batch.totals.hint_tokens
        == len(micro.student_index)
        == sum(e.hint_sites[0].end - e.hint_sites[0].start for e in group)
    )


def test_ungraded_evaluation_and_foreign_episodes_enter_no_channel() -> None:
    group = make_groups(1, 5, sites=1, pairs=1)[0]
    group[0] = replace(group[0], reward=None, outcome=Outcome.INFRA_ERROR)
    group[1] = replace(group[1], source="evaluation")
    group[2] = replace(group[2], token_ids=(VOCABULARY, *group[2].token_ids[1:]))
    batch = build([group])
    assert batch.counts["episodes_unusable"] == 3
    assert batch.totals.rows == batch.totals.pairs == batch.counts["sites"] == 2
    assert len(batch.episode_ids) == 5


def context(rows: Packed, row: int, column: int) -> tuple[int, ...]:
    """The tokens that a state sees, its own included."""
    return tuple(rows.ids[row, rows.mask()[row, 0, column] == 0].tolist())


def test_responses_are_predicted_from_the_recorded_prompt_and_the_response_so_far() -> None:
    episode = make_episode("e", "g", np.random.default_rng(0), pairs=2)
    other = replace(episode.pairs[0], rejected_ids=(5, 1))
    episode = replace(episode, pairs=(*episode.pairs, other))
    (micro,) = build([[episode]]).micro_batches
    responses = [p.chosen_ids for p in episode.pairs] + [p.rejected_ids for p in episode.pairs]
    assert micro.pairs == 3
    for number, response in enumerate(responses):
        prompt = episode.token_ids[: episode.pairs[number % 3].prompt_end]
        tokens = (micro.pair_response == number).nonzero()[:, 0].tolist()
        assert tuple(micro.pair_targets[tokens].tolist()) == response
        for done, token in enumerate(tokens):
            student, reference = micro.pair_student_index[token], micro.pair_reference_index[token]
            assert context(micro.student, *student.tolist()) == prompt + response[:done]
            assert context(micro.reference, *reference.tolist()) == prompt + response[:done]


def test_compared_states_see_the_episode_with_and_without_its_hint() -> None:
    episode = make_episode("e", "g", np.random.default_rng(0), sites=3, pairs=2)
    (micro,) = build([[episode]]).micro_batches
    expected = [
        (episode.token_ids[: site.insert_at], site.hint_ids, episode.token_ids[site.insert_at : token])
        for site in episode.hint_sites
        for token in range(site.start, site.end)
    ]
    indices = zip(micro.student_index.tolist(), micro.teacher_index.tolist(), strict=True)
    for (before, hint, after), (student, teacher) in zip(expected, indices, strict=True):
        assert context(micro.student, *student) == before + after
        assert context(micro.teacher, *teacher) == before + hint + after


def test_sites_and_pairs_that_make_no_sense_are_counted_not_trained() -> None:
    episode = make_episode("e", "g", np.random.default_rng(0), sites=2, pairs=2)
    site, pair = episode.hint_sites[0], episode.pairs[0]
    assert hint_context(episode, replace(site, end=10_000), np.ones(10_000, dtype=bool)) is None
    assert pair_context(episode, replace(pair, chosen_ids=pair.rejected_ids)) is None
    bad = replace(
        episode,
        hint_sites=(
            replace(site, start=site.end),
            episode.hint_sites[1],
            replace(site, hint_ids=(VOCABULARY,)),
        ),
        pairs=(replace(pair, chosen_ids=()), replace(pair, chosen_ids=(VOCABULARY,)), episode.pairs[1]),
    )
    counts = build([[bad]]).counts
    assert (counts["sites"], counts["sites_unusable"]) == (1, 2)
    assert (counts["pairs"], counts["pairs_unusable"]) == (1, 2)


def test_more_sites_and_pairs_than_allowed_are_sampled_with_the_seed_and_counted() -> None:
    groups = make_groups(4, 4, sites=3, pairs=3)
    rules = replace(RULES, max_sites=5, max_pairs=4)
    one, two = (build_step(groups, rules, version=0, seed=(7, 1)) for _ in range(2))
    other = build_step(groups, rules, version=0, seed=(7, 2))
    assert (one.counts["sites"], one.counts["sites_left_out"]) == (5, 43)
    assert (one.counts["pairs"], one.counts["pairs_left_out"]) == (4, 44)
    assert one.micro_batches[0].teacher.ids.equal(two.micro_batches[0].teacher.ids)
    assert not one.micro_batches[0].pair_targets.equal(other.micro_batches[0].pair_targets)


def test_a_switched_off_channel_builds_nothing() -> None:
    batch = build(make_groups(2, 2, sites=1, pairs=1), max_sites=0, max_pairs=0)
    assert batch.totals.hint_tokens == batch.totals.pairs == 0
    assert "sites_left_out" not in batch.counts


@given(seed=st.integers(0, 1000), pieces=st.integers(1, 9))
@settings(max_examples=25, deadline=None)
def test_a_split_keeps_every_row_token_and_index(seed: int, pieces: int) -> None:
    groups = make_groups(3, 3, seed=seed, sites=2, pairs=1)
    whole, split = build(groups), build(groups, micro_batches=pieces)
    assert len(split.micro_batches) == pieces
    for count in (
        lambda micro: int(micro.trained.sum()),
        lambda micro: len(micro.student_index),
        lambda micro: len(micro.teacher_index),
        lambda micro: len(micro.pair_student_index),
        lambda micro: len(micro.pair_reference_index),
        lambda micro: len(micro.pair_targets),
    ):
        assert sum(count(micro) for micro in split.micro_batches) == count(whole.micro_batches[0])
    lengths = [m.student.ids.shape[1] for m in split.micro_batches if len(m.student)]
    assert lengths == sorted(lengths)
    assert all((micro.student.branch[:, 0] == 0).all() for micro in split.micro_batches)


def test_a_group_of_nothing_usable_is_an_empty_step() -> None:
    group = [replace(e, reward=None, outcome=Outcome.INFRA_ERROR) for e in make_groups(1, 2, sites=1)[0]]
    batch = build([group], micro_batches=2)
    assert batch.totals.tokens == batch.totals.hint_tokens == 0
    assert all(not len(m.student) for m in batch.micro_batches)
    assert "reward_mean" not in batch.counts
