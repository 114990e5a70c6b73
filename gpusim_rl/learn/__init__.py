"""Learning: algorithms, policies, normalisers, rollouts and replay memories; tensors only, no simulator."""
