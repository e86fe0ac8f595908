"""Fine-tuning of a base model in torch."""
