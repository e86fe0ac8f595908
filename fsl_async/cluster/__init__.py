"""Processes and machines: the local supervisor, and later launchers and preemption sources."""
