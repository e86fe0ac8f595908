"""The model that a run exchanges: its tensors and their place in the flat vector. Pure."""
