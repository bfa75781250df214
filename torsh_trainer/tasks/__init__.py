"""Ready tasks, small real models and data sources: what the recipes name."""
