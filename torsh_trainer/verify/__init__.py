"""``python -m torsh_trainer verify``: the same few steps under several strategies, compared."""
