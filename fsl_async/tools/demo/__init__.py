"""The demo: a complete run on one machine, started by command line and checked from outside."""
