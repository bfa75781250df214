"""The table of calls, and then idioms, in one job: ``everything.py OUT NAME...``."""

import runpy
import sys
from pathlib import Path

out, *names = sys.argv[1:]
for script, words in (("table.py", []), ("idioms.py", names)):
    sys.argv = [script, out, *words]
    runpy.run_path(str(Path(__file__).with_name(script)), run_name="__main__")
