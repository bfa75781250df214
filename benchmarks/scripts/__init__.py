"""Whole programs whose start-up time and memory are measured."""
