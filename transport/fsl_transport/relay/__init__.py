"""The sockets of a relay, which forwards bytes that it cannot read."""
