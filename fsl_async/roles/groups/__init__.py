"""Groups of parameter servers: when they average what their groups gained, and over which cuts."""
