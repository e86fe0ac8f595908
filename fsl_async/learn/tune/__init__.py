"""Fine-tuning of a base model that every site has.

    records       rows of jsonl, JSON and CSV files, as samples
    tokens        samples as token ids, and batches of them
    objectives    the losses: next token, labels, preferences (torch)
    zeroth        projected gradients of a round, from losses alone
    base          the base model and its tokenizer (torch, transformers)
    base_files    facts of a base model, from its files alone

`records`, `tokens` and `base_files` do not import torch.
"""
