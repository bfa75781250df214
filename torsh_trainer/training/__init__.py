"""A run: what it is made of, its processes, its loop, and what it goes on from."""
