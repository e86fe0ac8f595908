"""The parameter server's process."""
