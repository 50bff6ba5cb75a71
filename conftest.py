"""Set before any test imports Ray: its hook would start every worker through `uv run` in an uploaded copy of the folder."""

import os

os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"
