"""LightningModules as Lightning's documentation writes them; none knows what trains it."""
