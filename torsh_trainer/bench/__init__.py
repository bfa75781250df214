"""``python -m torsh_trainer comm bench``: collectives over all backends, side by side."""
