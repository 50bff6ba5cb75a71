"""tools/bench_gpu.py: its tiny form measures on a CPU, and a part that fails or hangs does not stop the others."""

import argparse
import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

TOOLS = Path(__file__).parent.parent / "tools"


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(TOOLS))
    monkeypatch.setenv("OMNI_ROLLOUT_CPU", "1")
    import bench_gpu

    return bench_gpu


FEW, OTHERS = ("ceiling", "trainer"), ("changes", "precision", "sizes", "plain")


@pytest.mark.parametrize("parts", [FEW, pytest.param(OTHERS, marks=pytest.mark.nightly)], ids=["few", "others"])
def test_the_tiny_form(bench, forked, monkeypatch, capsys, tmp_path, parts):
    """Each part is a process of its own."""
    started = []

    def popen(command, env, stdout, **_):
        assert command[0] == sys.executable
        started.append(forked(command[1:], env=env, stdout=stdout))
        return started[-1]

    monkeypatch.setattr(bench, "subprocess", SimpleNamespace(Popen=popen))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    command = ["bench_gpu.py", "--model", "tiny", "--parts", *parts]
    command += ["--out", str(tmp_path / "found.jsonl"), "--logs", str(tmp_path), "--limit", "1200"]
    monkeypatch.setattr(sys, "argv", command)
    code, said = bench.main(), capsys.readouterr().out
    assert code == 0, said[-3000:] + "".join(one.communicate()[1][-1500:] for one in started)
    assert len(started) == len(parts)
    rows = [json.loads(line) for line in (tmp_path / "found.jsonl").read_text().splitlines()]
    by_name = {(row["part"], row["what"]): row for row in rows}
    assert all(row.get("good", True) for row in rows)
    assert {part for part, what in by_name if what == "done"} == set(parts)
    if parts == FEW:
        assert by_name["trainer", "log-prob floor of the own rollout"]["largest_log_prob_gap"] <= 1e-5
        assert by_name["trainer", "update, all recomputed"]["recomputed"] == [2]
        assert by_name["trainer", "update, all recomputed"]["gradient_off_by"] <= 1e-5
        assert by_name["ceiling", "matmul"]["tflops"] > 0
        assert by_name["trainer", "replay"]["tflops"] > 0
    else:
        assert by_name["precision", "2 blocks"]["gradient_not_compiled"] > 1e-3  # bf16 against fp32
        assert by_name["changes", "off: scale on the small tensor"]["gradient_off_by"] <= 1e-4
        assert by_name["sizes", "wan_5b, ours over plain"]["times"] > 0
        assert by_name["plain", "update"]["useful_tflops"] > 0
    assert "all good" in said


def test_the_full_size_passes_the_checks_before_a_start(bench, tmp_path):
    """Names and shapes of 20 B parameters are there to be read, and take no room."""
    import math

    from bench_program import command
    from ray_trainer.model_folder import part_shapes

    size = bench.MODELS["qwen_image_20b"]
    folder = bench.make_folder(size, tmp_path / "model")
    file = folder / "transformer" / "diffusion_pytorch_model.safetensors"
    assert file.stat().st_size > 40e9
    assert file.stat().st_blocks * 512 < 1e6
    assert 20.3e9 < sum(math.prod(shape) for shape in part_shapes(folder, "transformer").values()) < 20.6e9
    dry = command(size, folder, tmp_path, "--dry-run")
    done = subprocess.run(dry, capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-2000:]


def test_parts_that_fail_or_hang_are_reported(bench, monkeypatch, tmp_path):
    """Four parts on two cards: one fails, one hangs, one needs both cards, one is fine."""
    codes = {
        "ceiling": "pass",
        "plain": "raise SystemExit(3)",
        "trainer": "import time; time.sleep(60)",
        "ranks": "pass",
    }
    seen = {}

    def run_part(part, options, folder, into, log, cards, seconds):
        seen[part] = cards
        log.write_text("")
        return subprocess.Popen([sys.executable, "-S", "-c", codes[part]], start_new_session=True)

    monkeypatch.setattr(bench, "run_part", run_part)
    monkeypatch.setitem(bench.PARTS, "trainer", replace(bench.PARTS["trainer"], seconds=1.0))
    options = argparse.Namespace(parts=["trainer", "plain", "ceiling", "ranks"], cards=["0", "1"])
    start = time.monotonic()
    failed = bench.schedule(options, tmp_path, tmp_path / "out", tmp_path, time.monotonic() + 300)
    assert failed == ["plain: exit 3", "trainer: out of time"]
    assert {seen["trainer"], seen["plain"], seen["ceiling"]} == {"0", "1"}
    assert sorted(seen["ranks"].split(",")) == ["0", "1"]
    assert time.monotonic() - start < 60


def test_the_table_gives_shares_of_the_ceiling(bench):
    rows = [
        {"part": "ceiling", "what": "matmul", "tflops": 800.0},
        {"part": "trainer", "what": "update", "useful_tflops": 400.0, "seconds": 2.0},
    ]
    assert "useful_share=0.5" in bench.table(rows)
