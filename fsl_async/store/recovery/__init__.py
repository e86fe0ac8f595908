"""A run directory as it is opened: its ledger, its book, and what a crash left."""
