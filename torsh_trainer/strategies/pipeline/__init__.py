"""One model in stages over processes that have the same samples: cuts, schedules, and messages."""
