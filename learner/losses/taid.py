"""Temporally adaptive interpolated distillation: a target that moves from the student to the teacher."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from hintloop.learner.losses.reduction import TokenReduction, full_precision, require_logits

SMALLEST_LOSS = 1e-15
"""Added to the loss that the relative change is divided by."""


def taid(
    student_logits: Tensor,
    teacher_logits: Tensor,
    *,
    t: float,
    mask: Tensor,
    denominator: float | None = None,
) -> Tensor:
    """Mean cross-entropy of the student with a target between itself and the teacher; a scalar in nats.

    For ``(..., V)`` logits z_S and z_T of the same positions::

        p_t = softmax((1 - t) sg(z_S) + t z_T)
        loss = - sum over trained positions and entries of p_t log softmax(z_S) / denominator

    It is not a divergence: with p_t = softmax(z_S) it is the student's entropy (t = 0, gradient 0), and at t = 1
    it is above KL(T || S) by the teacher's entropy. Half precision is raised to fp32. An entry whose student
    logit is infinite adds nothing. No gradient reaches the teacher.

    ``mask`` (...) is boolean, True where a token is trained; what is elsewhere is never read. ``denominator`` is
    the number of trained tokens of the whole step where this is a part of one, and by default that of the mask;
    without trained tokens the result is exactly 0 and attached to the graph.

    Source: Shing et al., arXiv:2501.16937, and the public code of SakanaAI/TAID. ``ValueError`` for a t outside
    [0, 1], logits of different shapes, and a mask that is missing, not boolean or of another shape.
    """
    _require_share("t", t)
    require_logits(student_logits, teacher_logits)
    tokens = TokenReduction(student_logits.shape[:-1], mask, "mean", denominator)
    student = full_precision(tokens.rows(student_logits))
    target = _between(student.detach(), full_precision(tokens.rows(teacher_logits.detach())), t).softmax(-1)
    products = (target * F.log_softmax(student, dim=-1)).masked_fill(student.isinf(), 0.0)
    return tokens.reduce(-products.sum(-1))


@dataclass(slots=True)
class TAIDScheduler:
    """Moves ``t`` from ``start`` to ``end``, faster while the loss falls, never behind the straight line.

    Each loss L after the first, at a given step of ``steps``::

        m = momentum m + (1 - momentum) (L_before - L) / (L_before + 1e-15)
        t = min(end, max(start + (end - start) step / steps, t + alpha sigmoid(m) (1 - t)))

    The first loss is only remembered. A loss that is not finite, or not positive (as that of a part without
    trained tokens), would spoil m for thousands of steps: it changes nothing and is counted in ``ignored``. With
    few steps the straight line alone decides: with the defaults up to about 3000.

    Source: Shing et al., arXiv:2501.16937, and the public code of SakanaAI/TAID with its defaults.
    ``ValueError`` for settings out of range.
    """

    steps: int
    """Updates in all over which the straight line reaches ``end``."""
    start: float = 0.4
    end: float = 1.0
    alpha: float = 5e-4
    """Largest move of an update."""
    beta: float = 0.99
    """Share of m that is kept at an update."""
    adaptive: bool = True
    """False for the straight line alone."""

    t: float = math.nan
    """What the next loss is to be computed with."""
    prev: float | None = None
    """The last usable loss."""
    momentum: float = 0.0
    """m: the smoothed relative fall of the loss."""
    ignored: int = 0
    """Losses that were not usable."""

    def __post_init__(self) -> None:
        _require_share("start", self.start)
        _require_share("end", self.end)
        _require_share("beta", self.beta)
        if self.start > self.end:
            raise ValueError(f"start must not be above end, not {self.start} and {self.end}")
        if self.steps < 1:
            raise ValueError(f"steps must be at least 1, not {self.steps}")
        if not 0.0 <= self.alpha < math.inf:
            raise ValueError(f"alpha must be finite and not negative, not {self.alpha}")
        if math.isnan(self.t):
            self.t = self.start
        _require_share("t", self.t)

    def update(self, loss: float, step: int) -> float | None:
        """Take in the loss (nats) of ``step`` of ``steps``; the adaptive move that was offered, if any.

        ``ValueError`` for a negative step.
        """
        if step < 0:
            raise ValueError(f"the step must not be negative, not {step}")
        if not 0.0 < loss < math.inf:
            self.ignored += 1
            return None
        before, self.prev = self.prev, loss
        if before is None:
            return None
        line = self.start + (self.end - self.start) * step / self.steps
        if not self.adaptive:
            self.t = min(self.end, line)
            return None
        fall = (before - loss) / (before + SMALLEST_LOSS)
        self.momentum = self.beta * self.momentum + (1.0 - self.beta) * fall
        move = self.alpha * 0.5 * (1.0 + math.tanh(self.momentum / 2.0)) * (1.0 - self.t)
        self.t = min(self.end, max(line, self.t + move))
        return move

    def state_dict(self) -> dict[str, float | None]:
        """What a checkpoint needs, as plain numbers: t, prev, momentum, ignored."""
        return {"t": self.t, "prev": self.prev, "momentum": self.momentum, "ignored": self.ignored}

    def load_state_dict(self, state: dict[str, float | None]) -> None:
        """Continue from ``state_dict``. ``ValueError`` for other keys or values; then nothing has changed."""
        if state.keys() != self.state_dict().keys():
            raise ValueError(f"need {sorted(self.state_dict())}, not {sorted(state)}")
        t, prev, momentum, ignored = (state[name] for name in ("t", "prev", "momentum", "ignored"))
        if t is None or momentum is None or ignored is None or not math.isfinite(momentum):
            raise ValueError(f"t, momentum and ignored must be finite numbers, not {state}")
        if prev is not None and not 0.0 < prev < math.inf:
            raise ValueError(f"prev must be a positive loss or None, not {prev}")
        _require_share("t", t)
        self.t, self.prev, self.momentum, self.ignored = t, prev, momentum, int(ignored)


def _between(student: Tensor, teacher: Tensor, t: float) -> Tensor:
    """``(1 - t) student + t teacher``; an end is taken as it is, as 0 times an infinite logit has no value."""
    if t == 0.0:
        return student
    return teacher if t == 1.0 else (1.0 - t) * student + t * teacher


def _require_share(name: str, value: float) -> None:
    if not 0.0 <= value <= 1.0:
        raise ValueError(f"{name} must be in [0, 1], not {value}")
