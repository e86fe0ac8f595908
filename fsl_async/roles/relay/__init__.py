"""Decisions of a relay: which connections it accepts, and when it ends. Pure."""
