"""Settings: from Hydra's yaml to one frozen `RunSpec`. Nothing downstream sees a `DictConfig`."""
