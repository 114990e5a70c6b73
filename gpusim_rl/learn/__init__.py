"""Tensor-only learning: algorithms, policies, normalisers, rollouts and replay buffers."""
