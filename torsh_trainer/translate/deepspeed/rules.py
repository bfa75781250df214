"""The table of all rules for DeepSpeed, and the words of which they are made."""

from __future__ import annotations

from torsh_trainer.translate.deepspeed.source import Leaf, Source
from torsh_trainer.translate.outcomes import Outcome as Outcome
from torsh_trainer.translate.outcomes import approximate as approximate
from torsh_trainer.translate.outcomes import dead as dead
from torsh_trainer.translate.outcomes import exact as exact
from torsh_trainer.translate.outcomes import faster as faster
from torsh_trainer.translate.outcomes import refuse as refuse
from torsh_trainer.translate.rule_book import Rule, RuleBook

DeepSpeedRule = Rule[Source, Leaf]
_BOOK: RuleBook[Source, Leaf] = RuleBook()

RULES = _BOOK.rules
"""Id -> rule."""

rule = _BOOK.rule
constant_rule = _BOOK.constant_rule
fixed_rule = _BOOK.fixed_rule
switch_rule = _BOOK.switch_rule
refuse_unless = _BOOK.refuse_unless
