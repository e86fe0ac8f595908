"""The step to the next version, its snapshot, and global rounds."""
