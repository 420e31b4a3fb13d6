#!/bin/sh
# Runs in a fresh sandbox that holds only what the agent hands in; the working directory is that of the agent.
if python -m pytest -q /tests/test_roman.py >&2; then echo 1; else echo 0; fi >/logs/verifier/reward.txt
