"""Sessions: handshake, ordered control messages, heartbeats, expiry, access control. Pure."""
