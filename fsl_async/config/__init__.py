"""The configuration of a run: addresses, settings and their checks, and what clients receive."""
