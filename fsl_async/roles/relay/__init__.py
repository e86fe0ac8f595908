"""What a relay decides. Pure."""
