"""State that the lines of a ledger add up to. Pure."""
