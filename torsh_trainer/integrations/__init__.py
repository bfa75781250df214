"""Configurations of other engines in a script of one's own, trained natively; see docs/migrate."""
