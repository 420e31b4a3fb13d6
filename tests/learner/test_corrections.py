"""Off-policy weights by hand, against TRL, and over random inputs."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from trl import GRPOTrainer

from hintloop.learner.losses.corrections import correction_weights

RATIOS = torch.tensor([[0.1, 0.5, 1.0, 9.0], [2.0, 3.0, 5.0, 9.0]], dtype=torch.float64)
MASK = torch.tensor([[True, True, True, False], [True, True, True, True]])
SAMPLER = torch.full((2, 4), -1.5, dtype=torch.float64)
LEARNER = SAMPLER + RATIOS.log()


@pytest.mark.parametrize(
    ("kind", "settings", "expected", "share"),
    [
        ("none", {}, [[1, 1, 1, 0], [1, 1, 1, 1]], 0.0),
        ("tis", {}, [[0.1, 0.5, 1, 0], [2, 2, 2, 2]], 0.0),
        ("tis", {"cap": 4.0}, [[0.1, 0.5, 1, 0], [2, 3, 4, 4]], 0.0),
        ("icepop", {"low": 0.4, "high": 5.5}, [[0, 0.5, 1, 0], [2, 3, 5, 0]], 2 / 7),
        ("icepop", {"low": 0.0, "high": 100.0}, [[0.1, 0.5, 1, 0], [2, 3, 5, 9]], 0.0),
    ],
)
def test_weights_by_hand(kind: Any, settings: dict[str, float], expected: Any, share: float) -> None:
    weights, dropped = correction_weights(kind, LEARNER, SAMPLER, mask=MASK, **settings)
    torch.testing.assert_close(weights, torch.tensor(expected, dtype=torch.float64))
    assert dropped == pytest.approx(share)


def test_rows_that_drifted_are_dropped_when_their_advantage_is_negative() -> None:
    drift = -math.log(0.1 * 0.5) / 3  # of the first row, over its three trained tokens
    settings: dict[str, Any] = {"mask": MASK, "advantages": torch.tensor([-1.0, -1.0])}
    weights, dropped = correction_weights("sequence_mask", LEARNER, SAMPLER, delta=drift - 1e-6, **settings)
    assert weights.tolist() == [[0, 0, 0, 0], [1, 1, 1, 1]]
    assert dropped == pytest.approx(3 / 7)
    for delta, advantage in ((drift + 1e-6, -1.0), (drift - 1e-6, 0.0), (drift - 1e-6, 1.0)):
        settings["advantages"] = torch.tensor([advantage, -1.0])
        weights, dropped = correction_weights("sequence_mask", LEARNER, SAMPLER, delta=delta, **settings)
        assert weights.equal(MASK.double())
        assert dropped == 0.0


@given(st.integers(0, 2**32 - 1), st.floats(-0.5, 0.5))
def test_the_sequence_mask_is_that_of_trl(seed: int, delta: float) -> None:
    random = torch.Generator().manual_seed(seed)
    learner, sampler = (-torch.rand(2, 6, 5, generator=random, dtype=torch.float64) * 2).unbind()
    mask = torch.rand(6, 5, generator=random) < 0.6
    advantages = torch.randint(-1, 2, (6,), generator=random).double()
    weights, _ = correction_weights(
        "sequence_mask", learner, sampler, mask=mask, delta=delta, advantages=advantages
    )
    theirs = GRPOTrainer.get_off_policy_mask(advantages[:, None], learner, sampler, mask.long(), delta)
    assert weights.equal((theirs * mask).double())


@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from(["none", "tis", "icepop", "sequence_mask"]),
    st.floats(0.1, 10.0),
)
def test_weights_are_bounded_detached_and_blind_to_what_is_masked(seed: int, kind: Any, cap: float) -> None:
    random = torch.Generator().manual_seed(seed)
    learner, sampler = (-8 * torch.rand(2, 4, 5, generator=random)).unbind()
    mask = torch.rand(4, 5, generator=random) < 0.5
    settings: dict[str, Any] = {"cap": cap, "high": cap, "low": 0.1, "delta": 0.5}
    settings |= {"advantages": torch.randn(4, generator=random), "mask": mask}
    weights, dropped = correction_weights(kind, learner.requires_grad_(), sampler, **settings)
    spoiled = sampler.masked_fill(~mask, torch.nan)
    assert not weights.requires_grad
    assert not weights[~mask].any()
    assert weights.min() >= 0.0
    assert weights.max() <= max(1.0, cap)
    assert dropped == pytest.approx(int((weights[mask] == 0).sum()) / max(1, int(mask.sum())))
    assert correction_weights(kind, learner, spoiled, **settings)[0].equal(weights)


@given(st.floats(-50.0, 0.0), st.sampled_from(["none", "tis", "icepop"]))
def test_the_policy_that_sampled_has_weight_one(logprob: float, kind: Any) -> None:
    same = torch.full((3,), logprob)
    weights, dropped = correction_weights(kind, same, same, mask=torch.ones(3, dtype=torch.bool))
    assert weights.tolist() == [1.0] * 3
    assert dropped == 0.0


def test_ratios_beyond_all_bounds_stay_finite() -> None:
    far, mask = torch.tensor([-1e30, 0.0]), torch.tensor([True, True])
    assert correction_weights("tis", far.flip(0), far, mask=mask)[0].tolist() == [2.0, 0.0]
    weights, dropped = correction_weights("icepop", far.flip(0), far, mask=mask)
    assert (weights.tolist(), dropped) == ([0.0, 0.0], 1.0)


def test_no_trained_token_drops_nothing() -> None:
    weights, dropped = correction_weights("icepop", LEARNER, SAMPLER, mask=torch.zeros_like(MASK))
    assert not weights.any()
    assert dropped == 0.0


@pytest.mark.parametrize(
    ("kind", "changed", "match"),
    [
        ("mis", {}, "one of"),
        ("tis", {"cap": 0.0}, "cap"),
        ("icepop", {"low": 2.0, "high": 1.0}, "low"),
        ("tis", {"mask": MASK.long()}, r"boolean.*int64"),
        ("tis", {"mask": None}, "mask"),
        ("tis", {"mask": MASK[:1]}, "shape"),
        ("tis", {"sampler_logprobs": SAMPLER[:1]}, "sampler_logprobs"),
        ("tis", {"sampler_logprobs": SAMPLER * torch.nan}, "NaN"),
        ("sequence_mask", {"advantages": torch.zeros(2)}, "delta"),
        ("sequence_mask", {"delta": 0.1}, "advantages"),
        ("sequence_mask", {"delta": 0.1, "advantages": torch.zeros(3)}, "advantages"),
    ],
)
def test_what_has_no_meaning_is_refused(kind: Any, changed: dict[str, Any], match: str) -> None:
    given = {"logprobs": LEARNER, "sampler_logprobs": SAMPLER, "mask": MASK, **changed}
    with pytest.raises(ValueError, match=match):
        correction_weights(kind, **given)
