"""Values cross the sandbox wall exactly as they are, or not at all."""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter, OrderedDict, defaultdict, namedtuple
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hintloop.envs.grading.functions import same
from hintloop.envs.sandbox import limits
from hintloop.envs.sandbox.local import LocalProvider
from hintloop.envs.sandbox.values import TAG, NotData, decode, encode

FLAT = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.complex_numbers(allow_nan=False)
    | st.text()
    | st.just(TAG)
    | st.binary()
)
HASHABLE = st.recursive(
    FLAT,
    lambda inner: st.lists(inner, max_size=3).map(tuple) | st.frozensets(inner, max_size=3),
    max_leaves=5,
)
DATA = st.recursive(
    HASHABLE | st.sets(HASHABLE, max_size=4),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(HASHABLE, inner, max_size=4)
        | st.dictionaries(st.text() | st.just(TAG), inner, max_size=4)
        | st.dictionaries(HASHABLE, inner, max_size=3).map(OrderedDict)
        | st.dictionaries(HASHABLE, inner, max_size=3).map(lambda value: defaultdict(None, value))
    ),
    max_leaves=12,
)


def exact(value: Any) -> Any:
    """The value with its types, all the way down."""
    if isinstance(value, dict):
        return type(value), [(exact(key), exact(item)) for key, item in value.items()]
    if isinstance(value, set | frozenset):
        return type(value), frozenset(map(exact, value))
    if isinstance(value, list | tuple):
        return type(value), tuple(map(exact, value))
    return type(value), str(value) if isinstance(value, float | complex) else value


@given(DATA)
def test_every_value_comes_back_with_its_types(value: Any) -> None:
    text = encode(value)
    assert text.isascii()
    assert exact(decode(text)) == exact(value)
    assert encode(decode(text)) == text


@given(
    st.recursive(
        st.none() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text().filter(lambda key: key != TAG), inner),
        max_leaves=10,
    )
)
def test_what_json_can_hold_is_written_as_json(value: Any) -> None:
    assert encode(value) == json.dumps(value)


def test_nan_and_counters_come_back() -> None:
    assert math.isnan(decode(encode([math.nan]))[0])
    assert exact(decode(encode(Counter("abca")))) == exact(Counter("abca"))


def test_equal_sets_have_one_text() -> None:
    assert encode({"b", "a", 8, 0, (1,)}) == encode({(1,), 0, 8, "a", "b"})


def test_iterators_cross_as_their_items() -> None:
    for made in (
        (n for n in (1, 2)),
        map(abs, [1, -2]),
        iter([1, 2]),
        zip([1], [2], strict=True),
        itertools.chain([1], [2]),
        reversed([2, 1]),
        iter({1: 0, 2: 0}),
    ):
        back = decode(encode(made))
        assert isinstance(back, Iterator)
        assert list(back) in ([1, 2], [(1, 2)])


Pair = namedtuple("Pair", "a b")


class Equal(int):
    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return 0


class Liar:
    __class__ = int  # type: ignore[assignment]


class Meta(type):
    """Its classes are equal to every other."""

    def __eq__(cls, other: object) -> bool:
        return True

    def __hash__(cls) -> int:
        return hash(tuple)


class Tuple(metaclass=Meta):
    def __iter__(self) -> Iterator[int]:
        return iter([1])


@pytest.mark.parametrize(
    "value",
    [
        object(),
        Pair(1, 2),
        Equal(3),
        Liar(),
        Tuple(),
        int,
        len,
        {1}.add,
        Meta,
        range(3),
        {}.keys(),
        b"a".join,
    ],
    ids=lambda value: type(value).__name__,
)
def test_foreign_types_are_refused_at_any_depth(value: object) -> None:
    for holder in (value, [value], (value,), {"k": value}, {1: value}, iter([value])):
        with pytest.raises(NotData, match="unsupported type"):
            encode(holder)


def test_size_and_depth_are_bounded() -> None:
    deep: Any = 0
    for _ in range(limits.VALUE_DEPTH):
        deep = (deep,)
    assert decode(encode(deep)) == deep
    cyclic: list[Any] = []
    cyclic.append(cyclic)
    for nested in ((deep,), cyclic, [cyclic]):
        with pytest.raises(NotData, match="deep"):
            encode(nested)
    large: list[Any] = ["x" * limits.VALUE, b"x" * limits.VALUE, itertools.count(), itertools.repeat([])]
    for value in large:
        with pytest.raises(NotData, match="large"):
            encode(value)
    with pytest.raises(NotData, match="digits"):
        encode(10**5000)
    assert decode(encode("x" * limits.VALUE, 2 * limits.VALUE)) == "x" * limits.VALUE


@pytest.mark.parametrize(
    "text",
    [
        "",
        "NaN",
        "[Infinity]",
        '{"$": 1}',
        '{"$": []}',
        '{"$": ["eval", "1"]}',
        '{"$": ["tuple"], "b": 1}',
        '{"$": ["set", [1]]}',
        '{"$": ["bytes", "0"]}',
        '{"$": ["bytes", 5]}',
        '{"$": ["bytes"]}',
        '{"$": ["float", "1"]}',
        '{"$": ["complex", "1j", 2]}',
        '{"$": ["dict", [1, 2, 3]]}',
        '{"$": ["dict", [[], 2]]}',
        '{"$": [["tuple"]]}',
        "[" * 100_000,
    ],
)
def test_malformed_text_is_an_error(text: str) -> None:
    with pytest.raises((ValueError, RecursionError)):
        decode(text)


def test_items_that_share_one_hash_cannot_stall_the_reader() -> None:
    numbers = [n * (2**61 - 1) for n in range(100_000)]
    for text in (
        json.dumps({TAG: ["set", *numbers]}),
        json.dumps({TAG: ["dict", *([number, 0] for number in numbers)]}),
    ):
        with pytest.raises(ValueError, match="one hash"):
            decode(text)


@pytest.mark.parametrize(
    ("left", "right", "equal"),
    [
        ({1}, {True}, False),
        ({(1, 2)}, {(1, 2.0)}, False),
        ({1, 2}, {2, 1}, True),
        ({1: 2}, {True: 2}, False),
        ({(1,): [2]}, {(1,): (2,)}, True),
        ({1}, frozenset({1}), False),
        (b"a", "a", False),
        (1j, 1j, True),
    ],
)
def test_values_are_compared_with_their_types(left: Any, right: Any, equal: bool) -> None:
    assert same(left, right) is equal
    assert same(right, left) is equal


PATCHED = """
import builtins, collections, json, math, sys
def f(x):
    return x
def g(x):
    class Evil(list): pass
    builtins.type = builtins.tuple = builtins.len = builtins.sorted = builtins.dict = builtins.set = Evil
    json.dumps = math.isfinite = lambda *a: True
    collections.Counter = collections.OrderedDict = Evil
    values = sys.modules["hintloop.envs.sandbox.values"]
    values.encode = values.NotData = values._ITERATORS = values.limits = Evil
    return x
def h(x):
    class Evil(list):
        def __eq__(self, other): return True
    builtins.list = builtins.type = Evil
    return Evil()
"""


def test_calls_take_and_give_plain_data_whatever_is_patched() -> None:
    value = [
        (1, 2),
        {3},
        frozenset({"a"}),
        b"\x00",
        1j,
        {(1,): {2: None}},
        {TAG: -0.0},
        -math.inf,
        Counter("aa"),
    ]
    with LocalProvider() as provider:
        box = provider.start({"m.py": PATCHED})
        for function in ("f", "g"):
            (result,) = box.call_function("m.py", function, [[value]], timeout=10)
            assert result.error is None
            assert exact(result.value) == exact(value)
        results = box.call_function("m.py", "h", [[1], [1]], timeout=10)
        assert [result.error for result in results] == ["NotData: unsupported type Evil"] * 2
        with pytest.raises(NotData):
            box.call_function("m.py", "f", [[object()]], timeout=10)
