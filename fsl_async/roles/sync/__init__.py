"""Decisions of pretraining: the parameter server and its clients, rounds, triggers, weights of deltas. Pure."""
