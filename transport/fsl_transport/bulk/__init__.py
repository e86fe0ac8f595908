"""Streams of numbered chunks over several connections, with byte credit. Pure machines but for `streams` and `outgoing`."""
