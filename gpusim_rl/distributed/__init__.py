"""Training on more than one device: several processes that learn together."""
