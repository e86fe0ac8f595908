"""Decides for pretraining: the parameter server, its clients, rounds, triggers, weights. Pure."""
