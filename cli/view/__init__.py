"""``hintloop view``: a run in the browser, read from its files while they are being written."""
