"""Processes and machines: the local supervisor, launchers, sources of preemption, training that
hangs.
"""
