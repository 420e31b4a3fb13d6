import pytest
from roman import to_roman


@pytest.mark.parametrize(
    ("number", "numeral"),
    [
        (1, "I"),
        (4, "IV"),
        (9, "IX"),
        (40, "XL"),
        (90, "XC"),
        (400, "CD"),
        (1994, "MCMXCIV"),
        (3999, "MMMCMXCIX"),
    ],
)
def test_numerals(number, numeral):
    assert to_roman(number) == numeral


def test_each_numeral_is_another():
    assert len({to_roman(number) for number in range(1, 4000)}) == 3999


@pytest.mark.parametrize("number", [0, -1, 4000])
def test_what_has_no_numeral_is_refused(number):
    with pytest.raises(ValueError):
        to_roman(number)
