"""tools/bench_rollout.py on a CPU."""

import json
from pathlib import Path

from ray_trainer.assets import builtin

TOOLS = Path(__file__).parent.parent / "tools"


def test_bench_rollout_prints_one_object(forked):
    sizes = ["--samples", "6", "--group", "3", "--batch", "4", "--rounds", "1", "--steps", "2", "--json"]
    model = str(builtin("models", "tiny_qwen_image"))
    done = forked([TOOLS / "bench_rollout.py", "--model", model, *sizes])
    out, errors = done.communicate(timeout=280)
    assert done.returncode == 0, errors[-3000:]
    result = json.loads(out)
    assert result["images_per_s"] > 0
    assert result["batches"] == {"2": 1, "4": 1}
    assert {"encode", "denoise", "decode"} <= set(result["seconds_per_image"])
