"""The demo: a whole run on one machine, watched and checked from outside. It uses the nodes as anybody would: by their command line."""
