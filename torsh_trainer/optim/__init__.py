"""Optimizers, learning rates, precision and averages, as values."""
