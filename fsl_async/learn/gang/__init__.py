"""The ranks of one torchrun as one client: what a rank does, and what it shares with its node."""
