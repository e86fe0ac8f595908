"""Watching a run: the journal, and later progress, metrics and the status page."""
