"""The settings: few, described, and strict."""

from __future__ import annotations

import pytest
from pydantic import BaseModel, ValidationError

from hintloop.rollout.config import EvaluationConfig, RolloutConfig, TeachersConfig, TeacherSpec

SETTINGS = (RolloutConfig, EvaluationConfig, TeachersConfig, TeacherSpec)


@pytest.mark.parametrize("settings", SETTINGS)
def test_every_field_says_what_it_is(settings: type[BaseModel]) -> None:
    assert all(field.description for field in settings.model_fields.values())


@pytest.mark.parametrize("settings", SETTINGS[:3])
def test_unknown_names_are_refused_and_values_stay(settings: type[BaseModel]) -> None:
    with pytest.raises(ValidationError, match="extra"):
        settings.model_validate({"no_such_setting": 1})
    made = settings()
    with pytest.raises(ValidationError, match="frozen"):
        setattr(made, next(iter(settings.model_fields)), None)


def test_teachers_who_cannot_agree_are_refused() -> None:
    one = TeacherSpec(name="one", base_url="http://one/v1", model="m")
    with pytest.raises(ValidationError, match="agree is 2"):
        TeachersConfig(teachers=(one,), agree=2)
    with pytest.raises(ValidationError, match="same name"):
        TeachersConfig(teachers=(one, one))


@pytest.mark.parametrize("budget", ["budget_usd", "episode_budget_usd"])
def test_a_budget_needs_the_prices_of_every_teacher(budget: str) -> None:
    about = {"name": "one", "base_url": "http://one/v1", "model": "m"}
    for prices in ({}, {"usd_per_mtok_in": 1.0}, {"usd_per_mtok_out": 1.0}):
        with pytest.raises(ValidationError, match="teacher one has no price, and there is a budget"):
            TeachersConfig(teachers=[{**about, **prices}], **{budget: 1.0})
        assert TeachersConfig(teachers=[{**about, **prices}]).teachers[0].is_free != bool(prices)
    free = {**about, "usd_per_mtok_in": 0, "usd_per_mtok_out": 0}
    assert TeachersConfig(teachers=[free], **{budget: 1.0}).teachers[0].is_free


def test_a_teacher_is_on_openrouter_where_nothing_else_is_said() -> None:
    plain = TeacherSpec(name="one", model="m")
    assert (plain.base_url, plain.api_key_env) == ("https://openrouter.ai/api/v1", "OPENROUTER_API_KEY")
    assert TeacherSpec(name="one", model="m", api_key_env="MINE").api_key_env == "MINE"
    assert TeacherSpec(name="one", base_url="http://one/v1", model="m").api_key_env is None
