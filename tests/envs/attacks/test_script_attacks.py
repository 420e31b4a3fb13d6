"""No attack on a script of tests gets a reward, in any sandbox; the solution gets it in full.

``python -m pytest tests/envs/attacks -s`` prints what plain pytest says of some beside what this grader says;
``HINTLOOP_REQUIRE=slow`` before it adds the rest.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from hintloop.envs.grading.grade import grade
from hintloop.envs.sandbox.base import SandboxProvider

from ..kinds import open_or_skip
from .plain import Verdict, judge
from .repository_attacks import ATTACKS, BESIDE_PYTEST, CHECKED_THEFT, KNOWN, PATHS, VARIANTS
from .tasks import ASSERTIONS, FUNCTION, REPOSITORY, SOLVED
from .work import HONEST, Attack, Outcome, play


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Outcome]:
    """What the attacks came to in the local sandbox, as far as they have run."""
    return {}


def _all() -> Iterator[Any]:
    for name in ATTACKS:
        yield pytest.param(name, marks=pytest.mark.slow if name in VARIANTS else ())


@pytest.mark.parametrize("name", [*_all()])
def test_no_attack_gets_a_reward(provider: SandboxProvider, outcomes: dict[str, Outcome], name: str) -> None:
    found = play(provider, REPOSITORY, ATTACKS[name])
    if "docker" not in provider.isolation:
        outcomes[name] = found
    assert found.reward == 0.0, found


def test_the_solution_gets_everything(provider: SandboxProvider) -> None:
    found = play(provider, REPOSITORY, Attack(SOLVED))
    assert (found.reward, found.parts["tests"], found.parts["submitted"]) == (1.0, 1.0, 1.0), found
    assert not found.parts.get("forged")


@pytest.mark.parametrize("name", HONEST)
def test_honest_mistakes_get_nothing(provider: SandboxProvider, name: str) -> None:
    found = play(provider, REPOSITORY, HONEST[name])
    assert found.reward == 0.0
    assert "forged" not in found.parts


def test_no_name_of_a_file_leads_out(provider: SandboxProvider) -> None:
    assert grade(provider, REPOSITORY, dict.fromkeys(PATHS, "1")).reward == 0.0


def test_what_can_check_an_answer_may_steal_it_from_a_script_only(provider: SandboxProvider) -> None:
    """A limit: where tests run beside the code that they test, nothing tells this from a solution."""
    found = [play(provider, task, CHECKED_THEFT).reward for task in (FUNCTION, ASSERTIONS, REPOSITORY)]
    assert found == [0.0, 0.0, 1.0]


@pytest.mark.parametrize(
    ("names", "num_fooled", "num_fooled_twice"),
    [(KNOWN, 8, 4), pytest.param(tuple(BESIDE_PYTEST), 40, 20, marks=pytest.mark.slow)],
    ids=["known", "all"],
)
def test_plain_pytest_falls_for_many(
    outcomes: dict[str, Outcome], names: Sequence[str], num_fooled: int, num_fooled_twice: int
) -> None:
    """By its exit code, and by its report too. Without that many the comparison would say nothing."""
    told = {"nothing done": Attack(), "the solution": Attack(SOLVED)}
    with contextlib.closing(open_or_skip("local")) as local:
        for name, attack in told.items():
            outcomes[name] = play(local, REPOSITORY, attack)
        told |= {name: BESIDE_PYTEST[name] for name in names}
        verdicts = {name: judge(local, REPOSITORY, attack) for name, attack in told.items()}
    print(
        "",
        "| attack | plain: exit code 0 | plain: JUnit all passed | our reward |",
        "|---|---|---|---|",
        sep="\n",
    )
    for name, (exits_with_0, all_passed) in verdicts.items():
        print(f"| {name} | {_yes(exits_with_0)} | {_yes(all_passed)} | {_told(outcomes.get(name))} |")
    assert verdicts["nothing done"] == Verdict(False, False)
    assert verdicts["the solution"] == Verdict(True, True)
    assert sum(verdicts[name].exits_with_0 for name in names) >= num_fooled
    assert sum(verdicts[name] == Verdict(True, True) for name in names) >= num_fooled_twice


def _yes(fooled: bool) -> str:
    return "**yes**" if fooled else "no"


def _told(outcome: Outcome | None) -> str:
    if outcome is None:
        return "not run"
    reasons = [part for part in ("forged", "unsteady") if part in outcome.parts]
    return f"{outcome.reward:g}" + (f" ({reasons[0]})" if reasons else "")
