"""Programs one after the other in one process with one Ray, as `conftest.Hosted` asks.

A line when Ray is there; then a line of JSON for each program, and one back.
"""

import importlib
import io
import json
import sys
from contextlib import redirect_stderr, redirect_stdout

from ray_trainer.cli import run
from ray_trainer.cluster import ray_session
from ray_trainer.config import RayConfig

with ray_session(RayConfig()):
    print("ready", flush=True)
    for line in sys.stdin:
        app, arguments = json.loads(line)
        out, err = io.StringIO(), io.StringIO()
        with redirect_stdout(out), redirect_stderr(err):
            code = run(importlib.import_module(f"{app.replace('-', '_')}.cli").APP, arguments)
        print(json.dumps([code, out.getvalue(), err.getvalue()]), flush=True)
