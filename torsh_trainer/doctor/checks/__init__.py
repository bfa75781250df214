"""The checks of a host that ship: a class each, by what they look at."""
