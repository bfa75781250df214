"""A task of the user's own, written from what was read of a script."""
