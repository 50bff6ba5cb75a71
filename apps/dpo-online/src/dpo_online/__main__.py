"""`python -m dpo_online`."""

import sys

from .cli import main

sys.exit(main())
