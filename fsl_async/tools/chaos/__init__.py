"""Injects faults into a run on this machine, logs them, and reports what they cost."""
