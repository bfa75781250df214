"""Python scripts, read and never executed."""
