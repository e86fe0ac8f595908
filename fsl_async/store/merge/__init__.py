"""Merges: how the deltas of a round become an average."""
