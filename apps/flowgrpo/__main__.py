"""`uv run apps/flowgrpo` and `python apps/flowgrpo` start here."""

import sys

from flowgrpo.cli import main

sys.exit(main())
