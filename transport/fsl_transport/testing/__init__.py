"""A network in memory and a virtual clock, for tests and the simulator."""
