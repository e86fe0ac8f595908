"""Simulates a run of many clients that train a function of the user's, on one machine."""
