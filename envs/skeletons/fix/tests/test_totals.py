from totals import total


def test_nothing_off():
    assert total([1.5, 2.5], 0) == 4.0


def test_a_fifth_off():
    assert total([19.99, 5.01], 20) == 20.0


def test_all_off():
    assert total([3.0], 100) == 0.0


def test_no_amounts():
    assert total([], 50) == 0


def test_cents_are_rounded():
    assert total([0.99], 33) == 0.66
