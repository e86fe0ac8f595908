"""Files of chunks, folders that appear in one step, and ledgers."""
