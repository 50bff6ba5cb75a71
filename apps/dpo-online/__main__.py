"""`uv run apps/dpo-online` and `python apps/dpo-online` start here."""

import sys

from dpo_online.cli import APP
from ray_trainer.cli import run

sys.exit(run(APP))
