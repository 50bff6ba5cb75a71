"""Each leaf installs alone with uv into a fresh environment of every Python that is promised, and its README's examples run there.

Nightly, as it installs PyTorch nine times: `uv run --group test pytest tests/test_pythons.py -m nightly -n0`.
"""

import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
UV = shutil.which("uv")
LEAVES = ["sde-samplers", "diffusion-losses", "lora-sync", "image-rewards", "run-report"]
MORE = {"sde-samplers": ["./packages/model-specs", "diffusers==0.40.0", "transformers==5.14.1", "accelerate==1.12.0"]}
"""What a README's later examples have beside the leaf: a pipeline of one's own."""
PYTHONS = ["3.11", "3.12", "3.13"]

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(UV is None, reason="needs uv, which the README's command installs"),
]


def command(*arguments, cwd, timeout=280):
    environment = {k: v for k, v in os.environ.items() if k not in ("VIRTUAL_ENV", "PYTHONPATH")}
    done = subprocess.run(
        [str(a) for a in arguments], cwd=cwd, env=environment, capture_output=True, text=True, timeout=timeout
    )
    assert done.returncode == 0, f"{arguments}\n{done.stdout[-1500:]}\n{done.stderr[-3000:]}"
    return done.stdout


def test_these_are_the_promised_ones():
    promised = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["requires-python"]
    assert promised == ">=3.11,<3.14"


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("leaf", LEAVES)
def test_a_leaf_alone_runs_its_readme(leaf, python, tmp_path):
    command(UV, "venv", "--python", python, tmp_path / "venv", cwd=tmp_path)
    own = tmp_path / "venv" / "bin" / "python"
    assert command(own, "-c", "import sys; print('%d.%d' % sys.version_info[:2])", cwd=tmp_path).strip() == python
    command(UV, "pip", "install", "--python", own, ROOT / "packages" / leaf, cwd=ROOT)
    text = (ROOT / "packages" / leaf / "README.md").read_text(encoding="utf-8")
    first, *others = re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)
    command(own, "-c", first, cwd=tmp_path)
    if leaf in MORE:
        command(UV, "pip", "install", "--python", own, *MORE[leaf], cwd=ROOT)
    for code in others:
        command(own, "-c", code, cwd=tmp_path)
