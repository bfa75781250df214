"""The smallest plugin: one strategy, its configuration, a recipe and a verb."""
