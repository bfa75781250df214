"""The other direction: a native recipe becomes a file that another engine reads."""
