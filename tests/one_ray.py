"""Programs one after the other in one process with one Ray, as `conftest.Hosted` asks.

A line when Ray is there; then a line of JSON for each program, and one back.
"""

import importlib
import io
import json
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

from ray_trainer.cluster import prepare_environment, ray_session

prepare_environment()

from ray._private import parameter  # noqa: E402
from ray_trainer.cli import run  # noqa: E402
from ray_trainer.config import RayConfig  # noqa: E402

FORKS = Path(__file__).with_name("warm_worker.py")


class Forking(parameter.RayParams):
    """Of a Ray whose workers are forks of one process."""

    def __init__(self, *arguments, **options):
        self.source = subprocess.Popen([sys.executable, FORKS, "wait"], stdin=subprocess.PIPE)  # ends with this process
        super().__init__(*arguments, **options, setup_worker_path=str(FORKS))


parameter.RayParams = Forking

with ray_session(RayConfig()):
    print("ready", flush=True)
    for line in sys.stdin:
        app, arguments = json.loads(line)
        out, err = io.StringIO(), io.StringIO()
        with redirect_stdout(out), redirect_stderr(err):
            code = run(importlib.import_module(f"{app.replace('-', '_')}.cli").APP, arguments)
        print(json.dumps([code, out.getvalue(), err.getvalue()]), flush=True)
