def total(amounts, discount):
    """Sum of the amounts, less a discount in per cent, rounded to cents."""
    price = sum(amounts)
    return round(price * (1 - discount // 100), 2)
