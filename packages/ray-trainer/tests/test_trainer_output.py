"""A run never fails on printing, whatever its output is."""

import io
import os
import subprocess
import sys
from contextlib import nullcontext

import pytest
from ray_trainer import cli
from ray_trainer.cli import App, run
from ray_trainer.output import safe_output
from run_report import LiveLine

SAY = """
import sys
from ray_trainer.output import safe_output
with safe_output():
    for number in range(20000):
        print("before \\u2192 after \\u00b1 1", flush=number % 100 == 0)
        print("to err \\u2192", file=sys.stderr)
open(sys.argv[1], "w").write("done")
"""


def start(tmp_path, shell, encoding):
    """Exit code of the program above, and whether it came to its end."""
    program = tmp_path / "say.py"
    program.write_text(SAY)
    command = f"{sys.executable} {program} {tmp_path / 'end'} {shell}"
    env = {**os.environ, "PYTHONIOENCODING": encoding}
    done = subprocess.run(["bash", "-c", f"set -o pipefail; {command}"], env=env, capture_output=True, timeout=60)
    return done, (tmp_path / "end").exists()


@pytest.mark.parametrize("encoding", ["ascii", "cp1252", "utf-8", "latin-1"])
def test_what_cannot_be_shown_is_replaced(tmp_path, encoding):
    done, ended = start(tmp_path, "", encoding)
    assert (done.returncode, ended) == (0, True)
    assert ("→".encode() in done.stdout) == (encoding == "utf-8")
    assert b"before ? after" in done.stdout or encoding == "utf-8"


@pytest.mark.parametrize(
    "shell",
    ["| head -1", "2>&1 | head -1", ">&-", "2>&-", ">&- 2>&-", "> /dev/full", "2> /dev/full", "> /dev/full 2>&1"],
)
def test_output_that_goes_nowhere_ends_nothing(tmp_path, shell):
    done, ended = start(tmp_path, shell, "utf-8")
    assert (done.returncode, ended) == (0, True)
    assert b"Traceback" not in done.stderr
    assert b"Exception ignored" not in done.stderr


@pytest.mark.parametrize("plain", [True, False])
def test_the_live_line_on_a_stream_that_shows_no_arrow(plain, monkeypatch):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    with safe_output(), LiveLine(2, plain=plain) as live:
        live.note("warning: α → β")
        live.update(1, {"réward": 0.5})
    sys.stdout.flush()
    assert b"warning: ? ? ?" in raw.getvalue()


def test_the_program_itself(tmp_path, monkeypatch):
    """Everything that `run` and a training print goes through it."""
    (tmp_path / "tiny_flow_grpo.yaml").write_text("# a → b\nbase: builtin:tiny\n")

    class Trainer:
        def __init__(self, config):
            pass

        def fit(self):
            print("reward 0.1 → 0.2")

    monkeypatch.setattr(cli, "_algorithm", lambda app, config: Trainer)
    monkeypatch.setattr(cli, "ray_session", lambda config: nullcontext())
    app = App("flowgrpo", "says →", tmp_path, "tiny_flow_grpo", "policy_gradient", "nobody:Nothing")
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    assert run(app, ["--help"]) == 0
    assert run(app, [f"trainer.run_dir={tmp_path / 'été →'}"]) == 0
    sys.stdout.flush()
    assert b"reward 0.1 ? 0.2" in raw.getvalue()
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    assert run(app, ["nonsense"]) == 2
