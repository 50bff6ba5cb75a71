"""`uv run apps/flowgrpo` and `python apps/flowgrpo` start here."""

import sys

from flowgrpo.cli import APP
from ray_trainer.cli import run

sys.exit(run(APP))
