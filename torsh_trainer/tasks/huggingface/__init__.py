"""Hugging Face models as tasks: causal language models and sequence classification."""
