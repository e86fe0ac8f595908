"""A relay's process."""
