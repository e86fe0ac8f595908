"""Starts processes on machines: supervisor, launchers, relaunches of clients, clients' names."""
