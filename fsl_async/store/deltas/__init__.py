"""Deltas as they arrive: what their frames are, and where they are kept."""
