"""Faults on purpose against a run of this machine, with a record of its own, and a report of what they cost."""
