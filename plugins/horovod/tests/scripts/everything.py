"""Idioms, and then the table of calls, in one job: ``everything.py OUT NAME...``.

The table ends with ``shutdown``, and each ``init`` is one more that Horovod's gloo may fail at.
"""

import runpy
import sys
from pathlib import Path

out, *names = sys.argv[1:]
for script, words in (("idioms.py", names), ("table.py", [])):
    sys.argv = [script, out, *words]
    runpy.run_path(str(Path(__file__).with_name(script)), run_name="__main__")
