"""A vector is a tuple of numbers of one machine type."""

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hintloop.replay.vector import Vector


@given(st.lists(st.integers(-(2**31), 2**31 - 1)), st.integers(-20, 20), st.integers(-20, 20))
def test_it_behaves_like_the_tuple(values, start, stop):
    vector = Vector(values, "i")
    assert vector == tuple(values)
    assert vector == Vector(tuple(values), "i")
    assert (len(vector), list(vector), hash(vector)) == (len(values), values, hash(tuple(values)))
    assert vector[start:stop] == tuple(values[start:stop])
    assert isinstance(vector[start:stop], tuple)
    assert all(type(value) is int for value in vector)
    assert pickle.loads(pickle.dumps(vector)) == vector
    assert repr(vector) == repr(tuple(values))
    assert np.asarray(vector).tolist() == values


def test_an_array_of_the_type_is_not_copied_and_cannot_be_written_through():
    array = np.arange(5, dtype=np.int32)
    vector = Vector(array, "i")
    assert np.shares_memory(np.asarray(vector), array)
    with pytest.raises(ValueError, match="read-only"):
        np.asarray(vector)[0] = 7
    assert np.asarray(vector, dtype=np.int64).dtype == np.int64


def test_floats_are_kept_to_single_precision():
    assert Vector([0.1], "f")[0] == float(np.float32(0.1))


@pytest.mark.parametrize(
    ("values", "code"),
    [
        ([2**31], "i"),
        ([256], "B"),
        ([-1], "B"),
        ([1.5], "i"),
        (["a"], "f"),
        (np.zeros((2, 2), np.int32), "i"),
    ],
)
def test_what_does_not_fit_is_refused(values, code):
    with pytest.raises(ValueError, match="numbers"):
        Vector(values, code)
