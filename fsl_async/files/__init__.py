"""The disk, in memory too, and small files with private modes and checksums."""
