"""A network in memory and a clock that jumps, for tests and the simulator."""
