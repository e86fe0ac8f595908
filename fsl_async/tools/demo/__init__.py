"""The demo: a whole run on one machine, started by command line and checked from outside."""
