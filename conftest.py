"""Set before any test imports Ray or starts a process."""

import os
import sys

# Ray's hook would start every worker through `uv run` in an uploaded copy of the folder.
os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"
# Where this is set, each of the many processes that the tests start would compile torch anew: 18 s for what takes 6.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
