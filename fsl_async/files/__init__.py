"""Small files that this program writes for its owner alone and reads back with checksums."""
