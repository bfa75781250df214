"""Idioms, and then the table of calls, in one job: ``everything.py OUT NAME...``.

The table ends with ``shutdown``. Horovod cannot ``init`` again after it: a process may read
the address that its peer had before, and hangs or aborts.
"""

import runpy
import sys
from pathlib import Path

out, *names = sys.argv[1:]
for script, words in (("idioms.py", names), ("table.py", [])):
    sys.argv = [script, out, *words]
    runpy.run_path(str(Path(__file__).with_name(script)), run_name="__main__")
