"""Fails when a test of the real vLLM-Omni engine was skipped, or when none ran at all.

python tools/check_engine_tests.py JUNIT_REPORT.xml
"""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path


def verdict(report: Path) -> tuple[int, str]:
    """(exit code, sentence) for a pytest report in JUnit form."""
    every = ElementTree.parse(report).iter("testcase")
    cases = [case for case in every if "vllm" in case.get("classname", "") + case.get("name", "")]
    skipped = [case.get("name", "?") for case in cases if case.find("skipped") is not None]
    if not cases:
        return 1, "no test of the vLLM-Omni engine ran; is the `vllm` extra installed?"
    if skipped:
        return 1, f"{len(skipped)} test(s) of the vLLM-Omni engine were skipped: {', '.join(skipped[:5])}"
    return 0, f"{len(cases)} tests of the vLLM-Omni engine ran"


if __name__ == "__main__":
    code, sentence = verdict(Path(sys.argv[1]))
    print(sentence)
    sys.exit(code)
