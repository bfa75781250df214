"""Shell text as values: what a launch file would start, read and never executed."""
