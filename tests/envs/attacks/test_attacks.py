"""No attack gets a reward, in any sandbox; solutions get it in full, and honest mistakes do not.

``python -m pytest tests/envs/attacks -s`` prints what plain pytest says of some beside what these graders say;
``HINTLOOP_REQUIRE=slow`` before it adds the rest.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import pytest

from hintloop.envs.grading.grade import grade
from hintloop.envs.registry import register_task
from hintloop.envs.sandbox.base import SandboxDead, SandboxProvider
from hintloop.envs.sandbox.providers import open_provider
from hintloop.envs.task import Task

from . import assertion_attacks, function_attacks, repository_attacks
from .plain import Verdict, judge
from .repository_attacks import BESIDE_PYTEST, CHECKED_THEFT, KNOWN
from .tasks import ASSERTIONS, ENDED_LOOPS, FUNCTION, REPOSITORY, SOLVED
from .work import Attack, Outcome, play, source

KINDS = [
    "local",
    pytest.param("docker", marks=pytest.mark.docker),
    pytest.param("docker+gvisor", marks=pytest.mark.docker),
]


class Graded(NamedTuple):
    """A grader, by the task that it grades, and the attacks on it."""

    task: Task
    attacks: Mapping[str, Attack]


GRADERS = {
    "function": Graded(FUNCTION, function_attacks.ATTACKS),
    "assertions": Graded(ASSERTIONS, assertion_attacks.ATTACKS),
    "repository": Graded(REPOSITORY, repository_attacks.ATTACKS),
}
HONEST = {
    "nothing done": Attack(),
    "nearly right": source("def f(x):\n    return x * x if x < 12 else x + x\n"),
    "right for what is shown": source("def f(x):\n    return {3: 9, 0: 0}.get(x)\n"),
    "an error": source("def f(x):\n    return x.square()\n"),
    "no Python": source("def f(x:\n"),
}
"""Work that is wrong, and no more than that."""


@pytest.fixture(scope="module", autouse=True)
def _registered() -> None:
    for task in (FUNCTION, ASSERTIONS, REPOSITORY, ENDED_LOOPS):
        register_task(task)


@pytest.fixture(scope="module", params=KINDS)
def provider(request: pytest.FixtureRequest) -> Iterator[SandboxProvider]:
    made = _open_or_skip(cast(str, request.param))
    yield made
    made.close()


def _open_or_skip(kind: str) -> SandboxProvider:
    try:
        made = open_provider(kind, pool=3)
    except SandboxDead as error:
        pytest.skip(str(error))
    if kind == "local" and not {"user", "pid", "mount", "net"} <= set(made.isolation.split("+")):
        made.close()
        pytest.skip(f"this host only allows the isolation {made.isolation}")
    return made


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Outcome]:
    """What the attacks on scripts came to in the local sandbox, as far as they have run."""
    return {}


def _all() -> Iterator[Any]:
    for grader, made in GRADERS.items():
        for name in made.attacks:
            is_slow = grader == "repository" and name in repository_attacks.VARIANTS
            yield pytest.param(grader, name, marks=pytest.mark.slow if is_slow else ())


@pytest.mark.parametrize(("grader", "name"), [*_all()])
def test_no_attack_gets_a_reward(
    provider: SandboxProvider, outcomes: dict[str, Outcome], grader: str, name: str
) -> None:
    task, attacks = GRADERS[grader]
    found = play(provider, task, attacks[name])
    if grader == "repository" and "docker" not in provider.isolation:
        outcomes[name] = found
    assert found.reward == 0.0, found


@pytest.mark.parametrize("grader", GRADERS)
def test_solutions_get_everything(provider: SandboxProvider, grader: str) -> None:
    found = play(provider, GRADERS[grader].task, Attack(SOLVED))
    assert found == Outcome(1.0, {"tests": 1.0, "submitted": 1.0})


@pytest.mark.parametrize("name", HONEST)
@pytest.mark.parametrize("grader", GRADERS)
def test_honest_mistakes_get_nothing(provider: SandboxProvider, grader: str, name: str) -> None:
    found = play(provider, GRADERS[grader].task, HONEST[name])
    assert found.reward == 0.0
    assert "forged" not in found.parts


def test_no_name_of_a_file_leads_out(provider: SandboxProvider) -> None:
    for task in (FUNCTION, ASSERTIONS):
        for path in repository_attacks.PATHS:
            assert grade(provider, task, {path: "1"}).reward == 0.0
    assert grade(provider, REPOSITORY, dict.fromkeys(repository_attacks.PATHS, "1")).reward == 0.0


def test_what_ends_a_loop_of_a_check_is_no_answer(provider: SandboxProvider) -> None:
    attack = source("def f(x):\n    raise StopIteration\n")
    assert play(provider, ENDED_LOOPS, attack).reward == 0.0
    assert play(provider, ENDED_LOOPS, Attack(SOLVED)).reward == 1.0


def test_what_can_check_an_answer_may_steal_it_from_a_script_only(provider: SandboxProvider) -> None:
    """A limit: where tests run beside the code that they test, nothing tells this from a solution."""
    found = {name: play(provider, task, CHECKED_THEFT).reward for name, (task, _) in GRADERS.items()}
    assert found == {"function": 0.0, "assertions": 0.0, "repository": 1.0}


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
    with contextlib.closing(_open_or_skip("local")) as local:
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
