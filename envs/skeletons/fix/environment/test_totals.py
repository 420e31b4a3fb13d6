from totals import total


def test_a_quarter_off():
    assert total([10.0, 30.0], 25) == 30.0
