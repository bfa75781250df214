"""The table of all rules for Horovod."""

from __future__ import annotations

from torsh_trainer.translate.horovod.job import HorovodJob, Leaf
from torsh_trainer.translate.rule_book import Rule, RuleBook

HorovodRule = Rule[HorovodJob, Leaf]
_BOOK: RuleBook[HorovodJob, Leaf] = RuleBook()

RULES = _BOOK.rules
"""Id -> rule."""

rule = _BOOK.rule
constant_rule = _BOOK.constant_rule
fixed_rule = _BOOK.fixed_rule
switch_rule = _BOOK.switch_rule
