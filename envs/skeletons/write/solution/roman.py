_NUMERALS = {
    1000: "M", 900: "CM", 500: "D", 400: "CD", 100: "C", 90: "XC", 50: "L", 40: "XL", 10: "X", 9: "IX", 5: "V", 4: "IV", 1: "I",
}  # fmt: skip


def to_roman(number):
    if not 1 <= number <= 3999:
        raise ValueError(f"no Roman numeral for {number}")
    text = ""
    for value, numeral in _NUMERALS.items():
        count, number = divmod(number, value)
        text += numeral * count
    return text
