"""Identification: from a log of a robot on a rig to the drives of its simulation."""
