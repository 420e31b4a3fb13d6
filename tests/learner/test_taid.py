"""The interpolated target against its definition, and its schedule against a plain restatement."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hintloop.learner.losses.divergence import generalized_jsd
from hintloop.learner.losses.entropy import teacher_entropy
from hintloop.learner.losses.taid import TAIDScheduler, taid


def logits(seed: int, rows: int = 7, vocabulary: int = 11) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 3.0 * torch.randn(rows, vocabulary, generator=generator, dtype=torch.float64)


ALL = torch.ones(7, dtype=torch.bool)


@pytest.mark.parametrize("t", [0.0, 0.2, 0.5, 0.9, 1.0])
def test_taid_is_the_masked_mean_of_the_cross_entropy_with_the_mixed_logits(t: float) -> None:
    student, teacher = logits(0), logits(1)
    mask = torch.tensor([True, False, True, True, False, False, True])
    total = 0.0
    for z_s, z_t, trained in zip(student.tolist(), teacher.tolist(), mask.tolist(), strict=True):
        mixed = [math.exp((1 - t) * s + t * q) for s, q in zip(z_s, z_t, strict=True)]
        log_norm = math.log(sum(math.exp(s) for s in z_s))
        total -= trained * sum(p / sum(mixed) * (s - log_norm) for p, s in zip(mixed, z_s, strict=True))
    ours = taid(student, teacher, t=t, mask=mask)
    assert ours.item() == pytest.approx(total / 4, abs=1e-12)
    assert taid(student, teacher, t=t, mask=mask, denominator=8).item() == pytest.approx(total / 8, abs=1e-12)


def test_taid_at_zero_is_the_entropy_of_the_student_without_a_gradient() -> None:
    student = logits(0).requires_grad_()
    loss = taid(student, logits(1), t=0.0, mask=ALL)
    loss.backward()
    assert loss.item() == pytest.approx(teacher_entropy(student).mean().item())
    assert student.grad is not None
    assert student.grad.abs().max() < 1e-12


def test_taid_at_one_has_the_value_of_the_divergence_plus_the_entropy_and_its_gradient() -> None:
    student, other, teacher = logits(0).requires_grad_(), logits(0).requires_grad_(), logits(1)
    loss = taid(student, teacher, t=1.0, mask=ALL)
    forward = generalized_jsd(other, teacher, beta=0.0).mean()
    loss.backward()
    forward.backward()
    assert loss.item() == pytest.approx(forward.item() + teacher_entropy(teacher).mean().item())
    torch.testing.assert_close(student.grad, other.grad)


@pytest.mark.parametrize("t", [0.0, 0.5, 1.0])
def test_entries_that_are_impossible_for_the_student_add_nothing(t: float) -> None:
    student, teacher = logits(0), logits(1)
    student[:, 3] = -torch.inf
    student.requires_grad_()
    loss = taid(student, teacher, t=t, mask=ALL)
    loss.backward()
    others = [i for i in range(11) if i != 3]
    without = taid(student.detach()[:, others], teacher[:, others], t=t, mask=ALL)
    assert student.grad is not None
    assert student.grad.isfinite().all()
    assert math.isfinite(loss.item())
    if t < 1.0:
        assert loss.item() == pytest.approx(without.item())


def test_the_teacher_of_taid_gets_no_gradient_and_half_precision_is_raised() -> None:
    student, teacher = logits(0).requires_grad_(), logits(1).requires_grad_()
    taid(student, teacher, t=0.5, mask=ALL).backward()
    assert student.grad is not None
    assert teacher.grad is None
    assert taid(logits(0).bfloat16(), logits(1).bfloat16(), t=0.5, mask=ALL).dtype is torch.float32


def test_what_is_masked_is_never_read_and_no_trained_token_is_an_attached_zero() -> None:
    student, teacher, mask = logits(0), logits(1), ALL.clone()
    mask[2] = False
    expected = taid(student, teacher, t=0.5, mask=mask)
    student[2], teacher[2] = torch.nan, torch.inf
    student.requires_grad_()
    assert taid(student, teacher, t=0.5, mask=mask).item() == expected.item()
    nothing = taid(student, teacher, t=0.5, mask=~ALL)
    nothing.backward()
    assert nothing.item() == 0.0
    assert student.grad is not None
    assert not student.grad.any()


def test_taid_refuses_what_has_no_meaning() -> None:
    student, teacher = logits(0), logits(1)
    for t in (-0.1, 1.1, math.nan):
        with pytest.raises(ValueError, match="t must be in"):
            taid(student, teacher, t=t, mask=ALL)
    with pytest.raises(ValueError, match="one shape"):
        taid(student, teacher[:3], t=0.5, mask=ALL)
    with pytest.raises(ValueError, match=r"boolean.*int64"):
        taid(student, teacher, t=0.5, mask=ALL.long())
    with pytest.raises(ValueError, match="shape"):
        taid(student, teacher, t=0.5, mask=ALL[:3])
    with pytest.raises(ValueError, match="mask"):
        taid(student, teacher, t=0.5, mask=None)  # type: ignore[arg-type]


def schedule(losses: Sequence[float], steps: int) -> list[float]:
    """t after each loss, restated."""
    t, m, prev, result = 0.4, 0.0, None, []
    for step, loss in enumerate(losses):
        if prev is not None:
            m = 0.99 * m + 0.01 * ((prev - loss) / (prev + 1e-15))
            t = min(1.0, max(0.4 + 0.6 * step / steps, t + 5e-4 / (1 + math.exp(-m)) * (1 - t)))
        prev = loss
        result.append(t)
    return result


@pytest.mark.parametrize("steps", [100, 10_000])
def test_the_schedule_is_that_of_its_definition(steps: int) -> None:
    losses = [2.0 * math.exp(-i / 300) + 0.3 * math.sin(i) ** 2 for i in range(1000)]
    scheduler, seen = TAIDScheduler(steps), []
    for step, loss in enumerate(losses):
        scheduler.update(loss, step)
        seen.append(scheduler.t)
    assert seen == pytest.approx(schedule(losses, steps), abs=1e-12)
    assert seen[-1] == 1.0 or steps > 1000


@given(
    st.lists(st.floats(1e-6, 1e6) | st.sampled_from([math.nan, math.inf, -math.inf, 0.0]), max_size=60),
    st.integers(1, 50),
    st.booleans(),
)
def test_t_never_falls_and_unusable_losses_change_nothing(
    losses: list[float], steps: int, adaptive: bool
) -> None:
    scheduler = TAIDScheduler(steps, adaptive=adaptive)
    for step, loss in enumerate(losses):
        before, ignored = scheduler.state_dict(), scheduler.ignored
        scheduler.update(loss, step)
        if not 0 < loss < math.inf:
            assert scheduler.state_dict() == {**before, "ignored": ignored + 1}
        assert scheduler.start <= before["t"] <= scheduler.t <= scheduler.end  # type: ignore[operator]
        assert math.isfinite(scheduler.momentum)


def test_the_first_loss_is_only_remembered_and_the_plain_schedule_is_the_line() -> None:
    scheduler = TAIDScheduler(10, start=0.2, end=0.8, adaptive=False)
    assert scheduler.update(1.0, 5) is None
    assert (scheduler.t, scheduler.prev) == (0.2, 1.0)
    scheduler.update(1.0, 5)
    assert scheduler.t == pytest.approx(0.5)
    scheduler.update(1.0, 20)
    assert scheduler.t == 0.8


def test_a_schedule_continues_from_its_saved_state() -> None:
    losses = [3.0 / (1 + i) for i in range(40)]
    whole, first, second = TAIDScheduler(10_000), TAIDScheduler(10_000), TAIDScheduler(10_000)
    for step, loss in enumerate(losses):
        whole.update(loss, step)
        (first if step < 15 else second).update(loss, step)
        if step == 14:
            second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second.state_dict() == whole.state_dict()


def test_settings_and_states_without_a_meaning_are_refused() -> None:
    for settings in (
        {"steps": 0},
        {"start": 0.9, "end": 0.5},
        {"end": 1.5},
        {"alpha": math.nan},
        {"beta": -1},
    ):
        with pytest.raises(ValueError, match="must"):
            TAIDScheduler(**{"steps": 5, **settings})  # type: ignore[arg-type]
    scheduler = TAIDScheduler(5)
    good = scheduler.state_dict()
    for change in ({"t": 2.0}, {"t": None}, {"momentum": math.nan}, {"prev": 0.0}, {"extra": 1.0}):
        with pytest.raises(ValueError, match=r"must|need"):
            scheduler.load_state_dict({**good, **change})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="need"):
        scheduler.load_state_dict({"t": 0.5})
    with pytest.raises(ValueError, match="negative"):
        scheduler.update(1.0, -1)
    assert scheduler.state_dict() == good
