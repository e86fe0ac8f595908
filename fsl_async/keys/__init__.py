"""Key pairs, the allow-list of keys, and the client names of keys."""
