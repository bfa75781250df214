"""Overrides as the door reads them, beside Hydra's own grammar."""

from __future__ import annotations

import itertools

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from torsh_trainer.config.overrides import parse_override
from torsh_trainer.errors import ConfigError

KEYS = ["lr", "model.hidden", "data.a-b", "task/sub", "a/b.c", "a@b", "a.0", "9a", "null", "$a", ""]
NUMBERS = "0 -0 +3 12 012 1_000 1.5 -1.5 .5 5. 1.5e3 1.5E-3 1e5 1.e5 5e-4 inf -inf nan NaN 0x10"
WORDS = "null Null NULL true False TRUE none adamw a-b a_b -a a.b a/b _x x9 9x 9-x nullx true1 e5"
OTHERS = "a:b 1,2 a,b [1,2] {a:1} 'a' ${a} a=b f(1) choice(1,2) range(1,3) a\\,b a* é --3 1-"
VALUES = [*NUMBERS.split(), *WORDS.split(), *OTHERS.split(), "", " a", "a ", "a b"]


@pytest.mark.parametrize("sign", ["", "+", "++", "~", "+++"])
def test_every_override_is_read_as_hydra_reads_it(sign):
    parser = OverridesParser.create()
    for key, value in itertools.product(KEYS, VALUES):
        text = f"{sign}{key}={value}"
        try:
            expected = parser.parse_override(text)
        except HydraException:
            with pytest.raises(ConfigError):
                parse_override(text)
        else:
            assert repr(parse_override(text)) == repr(expected), text
