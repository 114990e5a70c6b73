"""Policies outside of training: run, adopt, stress and share export folders."""
