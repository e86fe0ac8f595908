"""Bytes by category and direction: planned, counted and summed."""
