"""The whole protocol under a virtual clock, with the production code."""
