"""The split server's process."""
