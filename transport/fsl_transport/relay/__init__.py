"""What a relay is made of: ZMTP's greeting, a resolver, and forwarders of bytes (docs/adr/0067)."""
