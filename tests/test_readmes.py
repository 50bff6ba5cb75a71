"""Every python block in a README or a page of docs/ runs as it stands."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted(ROOT.glob("docs/*.md"))
READMES = sorted([ROOT / "README.md", *ROOT.glob("packages/*/README.md"), *ROOT.glob("apps/*/README.md"), *PAGES])
PACKAGES = sorted(ROOT.glob("packages/*/README.md"))


def blocks(readme):
    """(line number, code) of each python block."""
    text = readme.read_text(encoding="utf-8")
    found = re.finditer(r"^```python\n(.*?)^```", text, re.M | re.S)
    return [(text[: m.start()].count("\n") + 2, m.group(1)) for m in found]


@pytest.mark.parametrize("readme", READMES, ids=[str(r.relative_to(ROOT)) for r in READMES])
def test_the_blocks_run(readme, tmp_path, monkeypatch):
    """In this process, where torch is imported already; each block starts with empty hands. `test_wheels.py` runs the packages'
    first blocks in processes and environments of their own."""
    monkeypatch.chdir(tmp_path)
    for line, code in blocks(readme):
        exec(compile("\n" * (line - 1) + code, str(readme), "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("readme", PACKAGES, ids=[p.parent.name for p in PACKAGES])
def test_every_package_shows_an_example(readme):
    assert blocks(readme), f"{readme} has no python block"
