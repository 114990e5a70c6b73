"""Learning: policies, normalisers, rollouts and PPO; tensors only, no simulator."""
