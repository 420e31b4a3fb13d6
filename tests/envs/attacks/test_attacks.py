"""No attack gets a reward, in any sandbox; solutions get it in full, and honest mistakes do not.

``python -m pytest tests/envs/attacks -s`` prints what plain pytest says of each beside what these graders say.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple, cast

import pytest

from hintloop.envs.grading.grade import grade
from hintloop.envs.registry import register_task
from hintloop.envs.sandbox.base import SandboxDead, SandboxProvider
from hintloop.envs.sandbox.providers import open_provider
from hintloop.envs.task import Task

from . import assertion_attacks, function_attacks, repository_attacks
from .plain import Verdict, judge
from .tasks import ASSERTIONS, FUNCTION, REPOSITORY, SOLVED
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
FOOLED = 25
"""So many attacks must fool plain pytest at least, or the comparison says nothing."""


@pytest.fixture(scope="module", autouse=True)
def _registered() -> None:
    for task, _ in GRADERS.values():
        register_task(task)


@pytest.fixture(scope="module", params=KINDS)
def provider(request: pytest.FixtureRequest) -> Iterator[SandboxProvider]:
    try:
        made = open_provider(cast(str, request.param), pool=3)
    except SandboxDead as error:
        pytest.skip(str(error))
    if request.param == "local" and not {"user", "pid", "mount", "net"} <= set(made.isolation.split("+")):
        made.close()
        pytest.skip(f"this host only allows the isolation {made.isolation}")
    yield made
    made.close()


@pytest.fixture(scope="module")
def table() -> Iterator[dict[str, tuple[Verdict | None, list[str]]]]:
    """What was found of each attack on the local sandbox; printed at the end."""
    yield {}


@pytest.mark.parametrize(("grader", "name"), [(g, n) for g, made in GRADERS.items() for n in made.attacks])
def test_no_attack_gets_a_reward(provider: SandboxProvider, grader: str, name: str) -> None:
    task, attacks = GRADERS[grader]
    found = play(provider, task, attacks[name])
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
