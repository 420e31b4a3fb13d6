"""The ``hintloop`` command: the typed config, its presets, and the programs that put the parts together.

The only place that knows all parts.
"""
