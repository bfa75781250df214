"""The command of a worker process: ``python -m torsh_trainer.launchers.worker``.

Nothing else lives here: ``-m`` runs this file under the name ``__main__``, and what a worker knows
of itself must exist once.
"""

from __future__ import annotations

import sys

from torsh_trainer.launchers.inside import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
