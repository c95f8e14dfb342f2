"""``python -m tests.sim``: see ``run.py``."""

import sys

from tests.sim.run import main

sys.exit(main())
