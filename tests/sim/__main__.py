"""``python -m tests.sim``: see ``run.py``."""

import sys

from server.extensions.chaos.sim.run import main

sys.exit(main())
