"""Sessions: hello, control messages in order and once, heartbeats, expiry, access. Pure machines."""
