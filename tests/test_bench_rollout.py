"""tools/bench_rollout.py on a CPU."""

import json
import subprocess
import sys
from pathlib import Path

from ray_trainer.assets import builtin

TOOLS = Path(__file__).parent.parent / "tools"


def test_bench_rollout_prints_one_object():
    sizes = ["--samples", "6", "--group", "3", "--batch", "4", "--rounds", "1", "--steps", "2", "--json"]
    model = str(builtin("models", "tiny_qwen_image"))
    command = [sys.executable, str(TOOLS / "bench_rollout.py"), "--model", model, *sizes]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout)
    assert result["images_per_s"] > 0
    assert result["batches"] == {"2": 1, "4": 1}
    assert {"encode", "denoise", "decode"} <= set(result["seconds_per_image"])
