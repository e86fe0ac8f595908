"""Rules that make a version of what clients sent: outer optimizers, aggregation, adapters. Pure."""
