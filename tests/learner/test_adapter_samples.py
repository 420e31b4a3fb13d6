"""Episodes as samples: which tokens count, what rides in a teacher's stream, and how hard pairs pull."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hintloop.learner.adapters.samples import (
    LARGEST_LOGPROB,
    NO_HINT,
    model_score,
    pair_weights,
    samples_of,
    teacher_stream,
)
from hintloop.learner.losses.preference import dpo
from hintloop.replay.episode import Outcome

from .factory import make_groups, tiny_model
from .training import logps


def test_without_a_vote_only_the_compared_tokens_count() -> None:
    ((voting, alone),) = make_groups(1, 2, rewards=(1.0, 0.0), sites=1)
    quiet = replace(alone, group_id="other", reward=None, outcome=Outcome.UNGRADED)
    (first, second) = samples_of([[voting, alone], [quiet]])[::2]
    assert first.advantage is not None
    assert first.trained.sum() == sum(voting.loss_mask)
    assert second.advantage is None
    (site,) = quiet.hint_sites
    assert np.flatnonzero(second.trained).tolist() == list(range(site.start, site.end))
    assert (second.hinted == second.trained).all()
    assert (second.logprobs[~second.trained] == 0.0).all()


def test_what_the_learner_leaves_out_is_left_out() -> None:
    ((first, second, third, fourth),) = make_groups(1, 4, rewards=(1.0, 0.0))
    broken = replace(first, reward=None, outcome=Outcome.INFRA_ERROR)
    stale = replace(fourth, policy_versions=[min(v, 0) for v in fourth.policy_versions])
    group = [broken, replace(second, source="evaluation"), third, stale]
    samples = samples_of([group], version=3, max_staleness=2)
    assert [sample.episode_id for sample in samples] == [third.episode_id, stale.episode_id]
    assert not any(sample.trained.any() for sample in samples)


def test_the_stream_has_the_teacher_at_the_compared_tokens() -> None:
    ((episode, _),) = make_groups(1, 2, sites=2)
    (sample, _) = samples_of(
        [[episode, replace(episode, episode_id="b", reward=0.0, outcome=Outcome.FAILED)]]
    )
    stream = teacher_stream(sample, model_score(tiny_model(1)))
    assert ((stream != NO_HINT) == sample.hinted).all()
    for site in episode.hint_sites:
        ids = list(episode.token_ids)
        hinted = [*ids[: site.insert_at], *site.hint_ids, *ids[site.insert_at : site.end]]
        with torch.no_grad():
            expected = logps(tiny_model(1), hinted)[-(site.end - site.start) :]
        assert np.allclose(stream[site.start : site.end], expected, atol=1e-5)


def test_a_certain_teacher_is_no_absent_hint() -> None:
    ((episode, _),) = make_groups(1, 2, sites=1)
    sample = samples_of([[episode]])[0]
    stream = teacher_stream(sample, lambda ids: np.zeros(len(ids), dtype=np.float32))
    assert (stream[sample.hinted] == np.float32(LARGEST_LOGPROB)).all()


def test_two_hints_at_one_token_are_refused() -> None:
    ((episode, _),) = make_groups(1, 2, sites=1)
    twice = replace(episode, hint_sites=episode.hint_sites * 2)
    with pytest.raises(ValueError, match="two hints are compared at one token"):
        teacher_stream(samples_of([[twice]])[0], model_score(tiny_model()))


@given(st.floats(-500, 500), st.floats(0.01, 5))
def test_pair_weights_are_the_derivative_of_dpo(margin: float, beta: float) -> None:
    chosen = torch.tensor([margin], dtype=torch.float64, requires_grad=True)
    zero = torch.zeros(1, dtype=torch.float64)
    dpo(chosen, zero, zero, zero, beta=beta).losses.sum().backward()
    assert chosen.grad is not None
    assert pair_weights(np.array([margin]), beta)[0] == pytest.approx(-float(chosen.grad), abs=1e-9)
