"""Vectors of the newest version, and the loop that makes the next one."""
