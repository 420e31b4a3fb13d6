"""Bundled generated task set: bugs of one token in small pure-Python functions."""
