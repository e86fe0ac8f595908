"""A client's training side: the `fed` object, snapshots, coded deltas, versions, the built-in task."""
