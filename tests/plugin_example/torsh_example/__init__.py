"""The smallest plugin: one of every kind that there is, each with its configuration."""
