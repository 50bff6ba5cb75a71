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
    found = re.finditer(r"^```python\n(.*?)^```", text, re.M | re.S)
    return [(text[: m.start()].count("\n") + 2, m.group(1)) for m in found]


@pytest.mark.parametrize("readme", READMES, ids=[str(r.relative_to(ROOT)) for r in READMES])
def test_the_blocks_run(readme, tmp_path):
    # One process for a page, so that it imports torch once; each block starts with empty hands.
    script = "".join(
        f"exec(compile({chr(10) * (line - 1) + code!r}, {str(readme)!r}, 'exec'), {{'__name__': '__main__'}})\n"
        for line, code in blocks(readme)
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("readme", PACKAGES, ids=[p.parent.name for p in PACKAGES])
def test_every_package_shows_an_example(readme):
    assert blocks(readme), f"{readme} has no python block"
