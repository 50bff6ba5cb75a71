"""Every python block in a README runs as it stands."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
READMES = sorted([ROOT / "README.md", *ROOT.glob("packages/*/README.md"), *ROOT.glob("apps/*/README.md")])
PACKAGES = sorted(ROOT.glob("packages/*/README.md"))


def blocks(readme):
    """(line number, code) of each python block."""
    text = readme.read_text(encoding="utf-8")
    return [
        (text[: m.start()].count("\n") + 1, m.group(1))
        for m in re.finditer(r"^```python\n(.*?)^```", text, re.M | re.S)
    ]


CASES = [(readme, line, code) for readme in READMES for line, code in blocks(readme)]


@pytest.mark.parametrize(("readme", "line", "code"), CASES, ids=[f"{r.relative_to(ROOT)}:{n}" for r, n, _ in CASES])
def test_the_block_runs(readme, line, code, tmp_path):
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, f"{readme.name} line {line}:\n{done.stderr[-3000:]}"


@pytest.mark.parametrize("readme", PACKAGES, ids=[p.parent.name for p in PACKAGES])
def test_every_package_shows_an_example(readme):
    assert blocks(readme), f"{readme} has no python block"
