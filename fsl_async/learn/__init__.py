"""The learning rooms: buffers, outer step, weighting, checkpoints, data, models."""
