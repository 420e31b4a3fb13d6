"""No attack on cases or assertions gets a reward, in any sandbox; solutions get it in full."""

from __future__ import annotations

import pytest

from hintloop.envs.grading.grade import grade
from hintloop.envs.sandbox.base import SandboxProvider

from . import assertion_attacks, function_attacks
from .repository_attacks import PATHS
from .tasks import ASSERTIONS, ENDED_LOOPS, FUNCTION, SOLVED
from .work import HONEST, Attack, play, source

TASKS = {"cases": FUNCTION, "assertions": ASSERTIONS}
ATTACKS = {"cases": function_attacks.ATTACKS, "assertions": assertion_attacks.ATTACKS}


@pytest.mark.parametrize(("grader", "name"), [(grader, name) for grader in TASKS for name in ATTACKS[grader]])
def test_no_attack_gets_a_reward(provider: SandboxProvider, grader: str, name: str) -> None:
    found = play(provider, TASKS[grader], ATTACKS[grader][name])
    assert found.reward == 0.0, found


@pytest.mark.parametrize("grader", TASKS)
def test_solutions_get_everything(provider: SandboxProvider, grader: str) -> None:
    found = play(provider, TASKS[grader], Attack(SOLVED))
    assert (found.reward, found.parts["tests"], found.parts["submitted"]) == (1.0, 1.0, 1.0), found
    assert not found.parts.get("forged")


@pytest.mark.parametrize("name", HONEST)
@pytest.mark.parametrize("grader", TASKS)
def test_honest_mistakes_get_nothing(provider: SandboxProvider, grader: str, name: str) -> None:
    found = play(provider, TASKS[grader], HONEST[name])
    assert found.reward == 0.0
    assert "forged" not in found.parts


def test_no_name_of_a_file_leads_out(provider: SandboxProvider) -> None:
    for task in TASKS.values():
        for path in PATHS:
            assert grade(provider, task, {path: "1"}).reward == 0.0


def test_what_ends_a_loop_of_a_check_is_no_answer(provider: SandboxProvider) -> None:
    attack = source("def f(x):\n    raise StopIteration\n")
    assert play(provider, ENDED_LOOPS, attack).reward == 0.0
    assert play(provider, ENDED_LOOPS, Attack(SOLVED)).reward == 1.0
