"""Scripts written for another engine, run unmodified over ours; see docs/migrate/drop-in.md."""
