"""Small files with private modes and checksums."""
