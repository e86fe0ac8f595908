"""A process and its operating system: signals, preemption, hangs, threads, memory, terminal."""
