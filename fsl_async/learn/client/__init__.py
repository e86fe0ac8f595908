"""A client's learning: the `fed` object, training and exchange, the built-in task."""
