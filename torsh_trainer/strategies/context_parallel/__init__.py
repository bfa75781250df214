"""Sequences cut over processes that have the same samples: the cut, the exchange, the watch."""
