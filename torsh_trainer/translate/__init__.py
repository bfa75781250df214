"""Foreign configurations become native ones, with a verdict for every key."""
