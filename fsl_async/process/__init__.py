"""What a process does with its operating system: signals, notices of preemption, threads, heap,
terminal.
"""
