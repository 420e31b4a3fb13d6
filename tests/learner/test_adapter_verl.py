"""The adapter for verl, in the real verl: one step in a process of the Python that ``HINTLOOP_VERL_PYTHON`` names.

``containers/verl-env DIR`` makes one.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hintloop.replay.episode import Episode
from hintloop.replay.journal import Journal

from .channels import our_gradient, sampled_groups
from .factory import tiny_model

STEP = Path(__file__).parent / "verl_step.py"


@pytest.fixture(scope="module")
def python() -> str:
    found = os.environ.get("HINTLOOP_VERL_PYTHON")
    if found is None:
        pytest.skip("HINTLOOP_VERL_PYTHON names no Python that has verl")
    if shutil.which(found) is None:
        pytest.fail(f"HINTLOOP_VERL_PYTHON: {found} is no program")
    return found


@pytest.fixture(scope="module")
def groups() -> list[list[Episode]]:
    return sampled_groups(tiny_model())


@pytest.fixture(scope="module")
def folder(groups: list[list[Episode]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A journal with the groups, and three models."""
    folder = tmp_path_factory.mktemp("verl")
    episodes = [episode for group in groups for episode in group]
    Journal(folder / "journal").writer("w").append(episodes)
    for seed, name in enumerate(("student", "teacher", "reference")):
        tiny_model(seed).save_pretrained(folder / name)
    return folder


@pytest.fixture(scope="module")
def found(python: str, repository: Path, folder: Path) -> dict[str, Any]:
    """With this source tree, and with the adapter named in the variable that verl reads."""
    (folder / "src").mkdir()
    (folder / "src" / "hintloop").symlink_to(repository)
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR") if name in os.environ}
    environment = {
        **kept,
        "PYTHONPATH": str(folder / "src"),
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "VERL_USE_EXTERNAL_MODULES": "hintloop.learner.adapters.verl",
    }
    example = repository / "examples" / "verl" / "step.py"
    command = [python, "-W", "ignore", str(STEP), str(folder), str(example)]
    made = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert made.returncode == 0, made.stderr[-3000:]
    result: dict[str, Any] = json.loads((folder / "found.json").read_text())
    return result


def test_verl_finds_both_by_the_variable_alone(found: dict[str, Any]) -> None:
    assert found["registered"]
    assert found["same"]


def test_on_policy_gradient_of_all_channels_is_ours(
    found: dict[str, Any], folder: Path, groups: list[list[Episode]], tmp_path: Path
) -> None:
    models = {"model": tiny_model(), "teacher": tiny_model(1), "reference": tiny_model(2)}
    ours = our_gradient(groups, tmp_path, **models)
    theirs = torch.from_numpy(np.load(folder / "gradient.npy"))
    assert found["metrics"]
    assert (theirs - ours).norm() / ours.norm() < 1e-6


def test_rows_are_the_episodes_and_both_sides_of_each_pair(
    found: dict[str, Any], groups: list[list[Episode]]
) -> None:
    episodes = [episode for group in groups for episode in group]
    pairs = sum(len(e.pairs) for e in episodes)
    compared = sum(site.end - site.start for e in episodes for site in e.hint_sites)
    assert found["episodes"] == len(episodes) - sum(not e.hint_sites and e.reward is None for e in episodes)
    assert found["rows"] == found["episodes"] + 2 * pairs
    assert found["hint_tokens"] == compared
    shapes = found["shapes"]
    width = shapes["prompts"][1] + shapes["responses"][1]
    assert shapes["input_ids"] == shapes["attention_mask"] == [found["episodes"], width]
    assert shapes["hint_input_ids"] == shapes["hint_attention_mask"] == [found["episodes"], 2, width]
    assert shapes["chosen_input_ids"] == shapes["rejected_input_ids"] == [found["episodes"], 1, width]


def test_without_hints_and_pairs_it_is_grpo(found: dict[str, Any]) -> None:
    assert found["plain"] < 1e-3  # 1e-4 and 1e-6 are added to the deviations
    assert found["vanilla"] < 1e-6


def test_untrained_tokens_have_no_gradient_and_are_never_read(found: dict[str, Any]) -> None:
    off, on = found["masked"]
    assert off == 0.0
    assert on > 0.0


def test_a_hint_moves_the_compared_tokens_only(found: dict[str, Any]) -> None:
    off, on = found["moved"]
    assert off == 0
    assert on == found["hint_tokens"]


def test_hints_stay_with_their_rows(found: dict[str, Any]) -> None:
    assert found["aligned"]


def test_what_makes_no_sense_is_refused(found: dict[str, Any]) -> None:
    assert [message.split()[0] for message in found["refusals"]] == ["these", "pairs"]


def test_the_example_pulls_pairs_apart(found: dict[str, Any]) -> None:
    before, after = found["example"][1], found["example"][3]
    assert before == 0.0
    assert after > 0.1
