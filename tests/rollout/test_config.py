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
