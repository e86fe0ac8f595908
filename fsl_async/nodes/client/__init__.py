"""A client's process, and `fsl_async.join` in a user's script."""
