"""Streams of chunks over several connections: credit, congestion control, reassembly. Pure."""
