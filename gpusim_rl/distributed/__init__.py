"""Training in several processes: data parallel under torchrun, actors for one learner, search of settings."""
