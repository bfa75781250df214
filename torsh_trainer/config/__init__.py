"""Hydra and what surrounds it: where configuration lies, how a command line becomes a run."""
