"""Parts of a relay: ZMTP's greeting, a resolver, and forwarders of bytes (docs/adr/0067)."""
