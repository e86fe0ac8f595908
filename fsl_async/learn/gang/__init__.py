"""A gang, the ranks of one client: what each of them does, and what it shares with its node."""
