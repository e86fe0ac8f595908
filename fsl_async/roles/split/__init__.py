"""Decisions of split learning: the split server, its clients, and what differs between methods.

Pure.
"""
