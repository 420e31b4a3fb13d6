"""Layers, errors and completeness of the config."""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hintloop.cli import toml
from hintloop.cli.config import TWINS, Config, known_keys, load_config, nearest_key, preset_names
from hintloop.cli.errors import UserError


def test_without_layers_everything_is_a_default() -> None:
    assert load_config() == Config()


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_is_valid_and_survives_a_round_trip(name: str, tmp_path: Path) -> None:
    config = load_config(preset=name)
    path = tmp_path / "config.toml"
    path.write_text(config.to_toml())
    assert load_config(file=path) == config


def test_bundled_presets() -> None:
    assert preset_names() == ["laptop", "model", "smoke"]


def test_what_is_not_said_of_a_teacher_stays_unsaid_in_the_file_of_a_run(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    spec = "{name='one', base_url='http://one/v1', model='m'}"
    config = load_config(assignments=[f"teachers.teachers=[{spec}, {{name='two', model='m'}}]"])
    path.write_text(config.to_toml())
    again = load_config(file=path)
    assert again == config
    assert [one.api_key_env for one in again.teachers.teachers] == [None, "OPENROUTER_API_KEY"]


def test_a_free_teacher_has_to_say_so_where_there_is_a_budget() -> None:
    spec = "name='one', base_url='http://one/v1', model='m'"
    with pytest.raises(UserError, match="teacher one has no price, and there is a budget"):
        load_config(assignments=[f"teachers.teachers=[{{{spec}}}]", "teachers.budget_usd=1"])
    free = f"{spec}, usd_per_mtok_in=0, usd_per_mtok_out=0"
    load_config(assignments=[f"teachers.teachers=[{{{free}}}]", "teachers.budget_usd=1"])


def test_later_layers_win(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("[rollout]\ngroup_size = 5\nmax_tokens = 100\n\n[learner]\nsteps = 7\n")
    config = load_config(
        preset="smoke",
        file=path,
        assignments=["rollout.max_tokens=200", "learner.steps=8"],
        values={"learner.steps": 9},
    )
    assert (config.rollout.group_size, config.rollout.max_tokens, config.learner.steps) == (5, 200, 9)
    assert config.rollout.engine_slots == load_config(preset="smoke").rollout.engine_slots


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("student.model=Qwen/Qwen3-0.6B", "student.model", "Qwen/Qwen3-0.6B"),
        ("student.model='a b'", "student.model", "a b"),
        ("evaluation.during=[1, 2]", "evaluation.during", (1, 2)),
        ("learner.max_staleness=none", "learner.max_staleness", None),
        ("learner.learning_rate=1e-4", "learner.learning_rate", 1e-4),
        ("teachers.scripted=true", "teachers.scripted", True),
    ],
)
def test_values_of_assignments(text: str, key: str, value: object) -> None:
    assert load_config(assignments=[text]).value(key) == value


@pytest.mark.parametrize(("left", "right"), TWINS)
def test_setting_a_key_sets_its_twin(left: str, right: str) -> None:
    for key in (left, right):
        config = load_config(assignments=[f"{key}=3"])
        assert config.value(left) == config.value(right) == 3


def test_adapters_that_nobody_trains_are_refused() -> None:
    with pytest.raises(UserError, match=r"needs adapters: set learner\.lora_rank"):
        load_config(assignments=["rollout.weight_transfer=adapter"])
    assert load_config(assignments=["rollout.weight_transfer=adapter", "learner.lora_rank=4"])


def test_twins_that_disagree_in_one_file_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("[rollout]\ngroups_per_step = 2\n[learner]\ngroups_per_step = 3\n")
    with pytest.raises(UserError, match=r"rollout\.groups_per_step is 2, but learner\.groups_per_step is 3"):
        load_config(file=path)


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("rollout.grup_size", "rollout.group_size"),
        ("rolout.temperature", "rollout.temperature"),
        ("learner.stepz", "learner.steps"),
        ("leaner.learning_rate", "learner.learning_rate"),
        ("group_size", "rollout.group_size"),
        ("trainer.learning_rate", "learner.learning_rate"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_one(key: str, nearest: str) -> None:
    assert nearest_key(key) == nearest
    if "." in key:
        with pytest.raises(UserError, match=f"unknown key '{key}'; the nearest valid key is '{nearest}'"):
            load_config(assignments=[f"{key}=1"])


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("learner.steps", "section.key=value"),
        ("steps=3", "section.key=value"),
        ("rollout.group_size=0", "rollout.group_size: Input should be greater than or equal to 1"),
        ("rollout.group_size=many", "rollout.group_size: Input should be a valid integer"),
        ("rollout.hint_role=late", "rollout.hint_role: Input should be 'system' or 'user'"),
        ("run.name=a/b", "run.name: String should match"),
        ("learner.publish_every=4", "rollout.max_staleness must be at least learner.publish_every - 1"),
        ("teachers.scripted={}", "teachers.scripted: Input should be a valid boolean"),
    ],
)
def test_a_bad_value_is_one_line(assignment: str, message: str) -> None:
    with pytest.raises(UserError) as raised:
        load_config(assignments=[assignment])
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_agreement_counts_the_scripted_expert() -> None:
    other = "teachers.teachers=[{name='other', base_url='http://localhost:1/v1', model='m'}]"
    config = load_config(assignments=[other, "teachers.scripted=true", "teachers.agree=2"])
    assert [spec.name for spec in config.teachers.with_expert("http://localhost:2").teachers] == [
        "other",
        "expert",
    ]
    with pytest.raises(UserError, match="agree is 2, but there are 1 teachers"):
        load_config(assignments=["teachers.scripted=true", "teachers.agree=2"])


def test_unreadable_files_and_unknown_presets_are_user_errors(tmp_path: Path) -> None:
    broken = tmp_path / "broken.toml"
    broken.write_text("[run\n")
    with pytest.raises(UserError, match="no preset 'lapdog'; there are laptop, model, smoke"):
        load_config(preset="lapdog")
    with pytest.raises(UserError, match="is not TOML"):
        load_config(file=broken)
    with pytest.raises(UserError, match="cannot read"):
        load_config(file=tmp_path / "missing.toml")


@pytest.mark.parametrize("key", known_keys())
def test_every_key_is_read_somewhere(key: str, repository: Path, attributes: dict[str, set[str]]) -> None:
    """The part that owns the section, or the command line, must take the attribute from something."""
    section, _, name = key.partition(".")
    owner = {
        "learner": "learner",
        "replicas": "learner",
        "rollout": "rollout",
        "evaluation": "rollout",
        "teachers": "rollout",
    }
    assert name in attributes["cli"] | attributes[owner.get(section, "cli")]


@pytest.fixture(scope="module")
def attributes(repository: Path) -> dict[str, set[str]]:
    """Top-level folder -> names of all attributes that its code reads."""
    return {
        folder: {
            node.attr
            for path in (repository / folder).rglob("*.py")
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
        }
        for folder in ("cli", "learner", "rollout")
    }


SCALARS = (
    st.text(max_size=20)
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
)
KEYS = st.text(max_size=8)
VALUES = SCALARS | st.lists(SCALARS, max_size=3) | st.dictionaries(KEYS, SCALARS, max_size=3)


@given(st.dictionaries(KEYS, st.dictionaries(KEYS, VALUES, max_size=4), max_size=3))
def test_written_toml_reads_back(tables: dict[str, dict[str, object]]) -> None:
    assert tomllib.loads(toml.dumps(tables)) == tables
