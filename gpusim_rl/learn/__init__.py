"""Learning on tensors alone: algorithms, policies, normalisers, rollouts and replay memories."""
