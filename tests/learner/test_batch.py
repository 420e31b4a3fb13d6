"""Steps of random episodes: nothing is trained that must not be, and nothing vanishes uncounted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hintloop.learner.batch import BatchRules, StepBatch, build_step
from hintloop.learner.packing import Packed
from hintloop.learner.rows import cut_pair, cut_site, hint_context, pair_context, policy_of, recovery_of
from hintloop.replay.episode import Episode, HintSite

from .factory import VOCABULARY, make_groups

RULES = BatchRules(vocabulary=VOCABULARY, max_staleness=4)


@st.composite
def episode_groups(draw: st.DrawFn) -> list[list[Episode]]:
    """Groups with several sites and pairs, some of them senseless, some in episodes that may not be trained."""
    groups = make_groups(
        draw(st.integers(1, 3)),
        draw(st.integers(1, 4)),
        seed=draw(st.integers(0, 2**31)),
        rewards=draw(st.sampled_from([(1.0, 0.0), (1.0,), (1.0, 0.0, None), (0.0, 0.5, 1.0)])),
        turns=draw(st.integers(1, 4)),
        prompt=draw(st.integers(1, 9)),
        sites=draw(st.integers(0, 4)),
        hint_tokens=draw(st.integers(1, 6)),
        pairs=draw(st.integers(0, 4)),
    )
    for group in groups:
        for number, episode in enumerate(group):
            kind = draw(st.sampled_from(["as it is", "evaluation", "stale", "unscored", "senseless"]))
            group[number] = spoilt(episode, kind)
    return groups


def spoilt(episode: Episode, kind: str) -> Episode:
    if kind == "evaluation":
        return replace(episode, source="evaluation")
    if kind == "stale":
        return replace(episode, policy_versions=tuple(-9 if v == 0 else v for v in episode.policy_versions))
    if kind == "unscored":
        return replace(episode, logprobs=tuple(float("nan") for _ in episode.logprobs))
    if kind == "senseless":
        sites = tuple(replace(site, end=10_000) for site in episode.hint_sites[:1])
        pairs = tuple(replace(pair, chosen_ids=()) for pair in episode.pairs[:1])
        return replace(episode, hint_sites=sites + episode.hint_sites[1:], pairs=pairs + episode.pairs[1:])
    return episode


rules = st.builds(
    replace,
    st.just(RULES),
    micro_batches=st.integers(1, 5),
    max_sites=st.sampled_from([1, 3, 64]),
    max_pairs=st.sampled_from([1, 3, 64]),
    max_tokens=st.none() | st.integers(2, 40),
    site=st.sampled_from(["failing", "recovery"]),
)


def contexts(rows: Packed, index: list[list[int]]) -> Iterator[tuple[int, ...]]:
    """The tokens that each of the indexed states sees, its own included."""
    seen = rows.mask()[:, 0] == 0
    for row, column in index:
        yield tuple(rows.ids[row, seen[row, column]].tolist())


def pieces(batch: StepBatch) -> tuple[list[object], ...]:
    """What the micro-batches hold together, in no order: policy tokens, compared states, responses."""
    trained, compared, responses = [], [], []
    for micro in batch.micro_batches:
        where = micro.trained.nonzero().tolist()
        trained += zip(
            contexts(micro.student, where),
            micro.logprobs[micro.trained].tolist(),
            [float(micro.advantages[row]) for row, _ in where],
            strict=True,
        )
        compared += zip(
            contexts(micro.student, micro.student_index.tolist()),
            contexts(micro.teacher, micro.teacher_index.tolist()),
            strict=True,
        )
        responses += zip(
            contexts(micro.student, micro.pair_student_index.tolist()),
            contexts(micro.reference, micro.pair_reference_index.tolist()),
            micro.pair_targets.tolist(),
            (micro.pair_response < micro.pairs).tolist(),
            strict=True,
        )
    return sorted(trained), sorted(compared), sorted(responses)


@given(groups=episode_groups(), rules=rules)
@settings(max_examples=60, deadline=None)
def test_every_site_and_pair_is_used_or_counted_as_left_out(
    groups: list[list[Episode]], rules: BatchRules
) -> None:
    counts = build_step(groups, rules, version=0, seed=(0, 0)).counts
    episodes = [e for group in groups for e in group]
    for name, every in (("sites", [e.hint_sites for e in episodes]), ("pairs", [e.pairs for e in episodes])):
        parts = (name, f"{name}_left_out", f"{name}_unusable", f"{name}_too_long")
        assert sum(counts[part] for part in parts) == sum(map(len, every))
    usable = [e for e in episodes if e.reward is not None and e.source != "evaluation"]
    sampled = sum(sum(e.loss_mask) for e in usable)
    lost = counts["tokens_stale"] + counts["tokens_unscored"] + counts["tokens_too_long"]
    voting = sum(
        sum(e.loss_mask)
        for group in groups
        for e in group
        if e in usable and sum(other in usable for other in group) > 1
    )
    assert counts["tokens"] <= voting
    if voting == sampled:
        assert counts["tokens"] + lost == sampled


@given(groups=episode_groups(), rules=rules)
@settings(max_examples=60, deadline=None)
def test_only_sampled_tokens_are_trained_and_both_contexts_predict_the_same(
    groups: list[list[Episode]], rules: BatchRules
) -> None:
    batch = build_step(groups, rules, version=0, seed=(0, 0))
    sampled = {
        e.token_ids[: token + 1]
        for group in groups
        for e in group
        if e.reward is not None and e.source != "evaluation"
        for token in np.flatnonzero(e.loss_mask)
    }
    trained, compared, responses = pieces(batch)
    assert {context for context, _, _ in trained} <= sampled
    assert len(compared) == batch.counts["hint_tokens"] == batch.totals.hint_tokens
    assert sum(micro.pairs for micro in batch.micro_batches) == batch.counts["pairs"]
    assert all(student == reference for student, reference, _, _ in responses)
    size = rules.max_tokens or 10_000
    assert all(len(context) <= size for context, _, _ in trained)
    assert all(len(context) < size for pair in compared for context in pair)
    assert all(len(context) < size for context, _, _, _ in responses)
    turns = {
        (e.token_ids[:token], e.token_ids[token])
        for group in groups
        for e in group
        for token in np.flatnonzero(e.loss_mask)
    }
    for student, teacher in compared:
        hint = len(teacher) - len(student)
        assert hint > 0
        assert any(context[-len(student) :] == student for context, _ in turns)
        assert any(teacher[:at] + teacher[at + hint :] == student for at in range(len(student)))


@given(groups=episode_groups(), rules=rules, count=st.integers(1, 7))
@settings(max_examples=40, deadline=None)
def test_any_number_of_micro_batches_holds_the_same(
    groups: list[list[Episode]], rules: BatchRules, count: int
) -> None:
    one, many = (
        build_step(groups, replace(rules, micro_batches=number), version=0, seed=(0, 0))
        for number in (1, count)
    )
    assert len(many.micro_batches) == count
    assert pieces(one) == pieces(many)
    assert one.totals == many.totals
    assert one.counts == many.counts


@given(
    groups=episode_groups(),
    cap=st.integers(2, 40),
    which=st.sampled_from(["failing", "recovery"]),
)
@settings(max_examples=60, deadline=None)
def test_a_cut_context_keeps_the_hint_and_the_turn_and_fills_the_cap(
    groups: list[list[Episode]], cap: int, which: str
) -> None:
    for episode in (e for group in groups for e in group):
        policy = policy_of(episode, version=0, max_staleness=None)
        for site in episode.hint_sites:
            moved = site if which == "failing" else recovery_of(episode, site)
            whole = moved and hint_context(episode, moved, policy.fresh)
            if not moved or not whole:
                continue
            needed = moved.hint_ids + episode.token_ids[moved.insert_at : moved.end]
            cut = cut_site(whole, cap)
            if cut is None:
                assert len(needed) > cap or moved.insert_at == moved.start
                continue
            student = cut.student if cut.is_cut else np.asarray(episode.token_ids)
            ids = np.concatenate([cut.prompt, cut.hinted])
            assert cut.is_cut == (moved.end + len(moved.hint_ids) > cap)
            assert len(cut) == len(ids) == min(cap, moved.end + len(moved.hint_ids))
            assert tuple(ids[-len(needed) :].tolist()) == needed
            target = list(episode.token_ids[moved.start : moved.end])
            assert student[cut.student_index + 1].tolist() == target
            assert ids[cut.teacher_index + 1].tolist() == cut.targets.tolist() == target
            assert cut.student_index.min() >= 0
        for pair in episode.pairs:
            sides = pair_context(episode, pair)
            if sides is None:
                continue
            short = cut_pair(sides, cap)
            longest = max(len(pair.chosen_ids), len(pair.rejected_ids))
            assert (short is None) == (longest + 1 > cap)
            if short:
                assert len(short) == min(cap, pair.prompt_end + longest)
                start = pair.prompt_end - len(short.prompt)
                assert tuple(short.prompt.tolist()) == episode.token_ids[start : pair.prompt_end]
                assert tuple(short.chosen.tolist()) == pair.chosen_ids
                assert tuple(short.rejected.tolist()) == pair.rejected_ids


def test_a_cut_site_and_a_cut_pair_become_rows_that_start_at_position_0() -> None:
    (episode,) = make_groups(1, 1, turns=5, sites=5, pairs=5)[0]
    episode = replace(episode, hint_sites=episode.hint_sites[4:], pairs=episode.pairs[4:])
    batch = build_step([[episode]], replace(RULES, max_tokens=16), version=0, seed=(0,))
    (micro,) = batch.micro_batches
    assert batch.counts["rows"] == len(micro.student) == 2
    assert batch.counts["sites_too_long"] == batch.counts["pairs_too_long"] == 0
    site = episode.hint_sites[0]
    rows = sorted(tuple(row[:2]) for row in micro.student.positions.tolist())
    assert rows == [(0, 1), (0, 1)]
    first = min(micro.student_index.tolist())
    student, teacher = (
        next(contexts(rows, [where]))
        for rows, where in ((micro.student, first), (micro.teacher, min(micro.teacher_index.tolist())))
    )
    lost = site.end + len(site.hint_ids) - 16
    assert student == episode.token_ids[lost : site.start]
    before = episode.token_ids[lost : site.insert_at]
    assert teacher == before + site.hint_ids + episode.token_ids[site.insert_at : site.start]


def test_tokens_beyond_the_cap_leave_the_policy_loss_and_its_denominator() -> None:
    groups = make_groups(1, 2, turns=4)
    batch = build_step(groups, replace(RULES, max_tokens=15), version=0, seed=(0,))
    below = sum(sum(e.loss_mask[:15]) for e in groups[0])
    assert batch.totals.tokens == below
    assert batch.counts["tokens_too_long"] == sum(sum(e.loss_mask[15:]) for e in groups[0])
    assert batch.counts["tokens_unscored"] == 0
    assert all(micro.student.ids.shape[1] <= 15 for micro in batch.micro_batches)


def test_recovery_compares_the_next_assistant_turn_with_the_hint_directly_before_it() -> None:
    (episode,) = make_groups(1, 1, turns=3, sites=3)[0]
    batch = build_step([[episode]], replace(RULES, site="recovery"), version=0, seed=(0,))
    assert (batch.counts["sites"], batch.counts["sites_unusable"]) == (2, 1)  # nothing follows the last turn
    _, compared, _ = pieces(batch)
    expected = []
    for site, turn in zip(episode.hint_sites, (episode.turns[2], episode.turns[4]), strict=False):
        before, opening = episode.token_ids[: turn.start - 1], episode.token_ids[turn.start - 1 : turn.start]
        for token in range(turn.start, turn.end):
            said = episode.token_ids[turn.start : token]
            expected.append((before + opening + said, before + site.hint_ids + opening + said))
    assert compared == sorted(expected)


@pytest.mark.parametrize("opening", ["another", "none"])
def test_a_next_turn_that_opens_otherwise_is_no_recovery(opening: str) -> None:
    (episode,) = make_groups(1, 1, turns=2, sites=1)[0]
    site: HintSite = episode.hint_sites[0]
    if opening == "another":
        start = episode.turns[2].start - 1
        ids = (*episode.token_ids[:start], 3, *episode.token_ids[start + 1 :])
        episode = replace(episode, token_ids=ids)
    else:
        episode = replace(episode, turns=episode.turns[:2])
    assert recovery_of(episode, site) is None
