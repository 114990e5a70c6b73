"""Settings: from Hydra's yaml to one frozen `RunSpec`. Nothing behind it sees a `DictConfig`."""
