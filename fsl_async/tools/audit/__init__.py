"""Audits what a site's own delta tells the server: makes one, and attacks it. No network."""
