"""The parameter server's durable state in one run directory. NumPy only."""
