"""Models: the built-in GPT, Hugging Face and image models, where each can be cut, LoRA."""
