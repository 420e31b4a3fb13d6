"""Recorded traces of other agents: recognised by content, read into one form, classified, and kept as episodes.

A format is a small reader (``detect.Format``) that gives ``trace.Trace``; everything behind it is shared.
"""
