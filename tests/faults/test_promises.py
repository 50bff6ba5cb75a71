"""docs/reliability.md: every test that it names is there."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "reliability.md"


def test_every_promise_names_a_test_that_exists():
    text = PAGE.read_text(encoding="utf-8")
    short = {file.stem.removeprefix("test_"): file for file in (ROOT / "tests" / "faults").glob("test_*.py")}
    short["scorer"] = ROOT / "packages/image-rewards/tests/test_scorer_service.py"
    named = re.findall(r"`([\w/.-]+)::(\w+)`", text)
    assert len(named) > 20
    for place, name in named:
        file = short.get(place) or ROOT / place
        assert f"def {name}(" in file.read_text(encoding="utf-8"), (
            f"{PAGE.name} names {place}::{name}, which is nowhere"
        )
    rows = [line for line in text.splitlines() if line.startswith("| ") and " test |" not in line]
    assert [row for row in rows if "test_" not in row] == []
