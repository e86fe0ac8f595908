"""The configuration of a run: addresses, settings and their rules, what a run fixes, what clients
are sent.
"""
