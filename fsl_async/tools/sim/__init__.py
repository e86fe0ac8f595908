"""Simulates complete runs under a virtual clock, with the production code."""
