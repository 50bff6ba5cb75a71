"""`uv run apps/dpo-online` and `python apps/dpo-online` start here."""

import sys

from dpo_online.cli import main

sys.exit(main())
