"""Versions and global weights on disk."""
