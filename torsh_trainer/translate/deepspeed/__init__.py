"""DeepSpeed configurations: keys, rules, and the translation."""
