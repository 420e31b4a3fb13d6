"""The learning maths as pure functions: no model, no trainer, no logging."""
