"""`python -m lora_sync`: tables a person can read, exit codes a script can use."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from lora_sync import LoRAPayload, export, extract_lora, load_any
from lora_sync.cli import main


@pytest.fixture
def payload(tools):
    return extract_lora(tools.adapted(alpha=6), version=12, base_fingerprint="base:cafe")


def test_inspect_shows_what_is_inside(payload, tmp_path, capsys):
    path = payload.save(tmp_path / "a.safetensors")
    assert main(["inspect", str(path)]) == 0
    text = capsys.readouterr().out
    for word in ("qwen_image", "version 12", payload.hash, "48 modules", "float32", "base:cafe", "1.5"):
        assert word in text
    row = next(line for line in text.splitlines() if "attn.to_out.0" in line)
    assert row.split()[:4] == ["transformer_blocks.*.attn.to_out.0", "4", "4×128", "128×4"]
    name = "transformer_blocks.0.attn.to_out.0"
    norms = [
        float(torch.linalg.norm(1.5 * payload.tensors[m + ".lora_B.weight"] @ payload.tensors[m + ".lora_A.weight"]))
        for m in (name.replace("0", str(block), 1) for block in range(4))
    ]
    assert float(row.split()[-1]) == pytest.approx(sum(norms) / 4, rel=1e-3)


@pytest.mark.parametrize("format", ["diffusers", "peft", "comfy"])
def test_convert_there_and_back(payload, tmp_path, capsys, format):
    source = payload.save(tmp_path / "a.safetensors")
    target = tmp_path / ("b.safetensors" if format == "comfy" else "b")
    assert main(["convert", str(source), str(target), "--to", format]) == 0
    assert "48 modules, 96 tensors, read back equal" in capsys.readouterr().out
    found, kind = load_any(target)
    assert (kind, found.hash, found.version) == (format, payload.hash, 12)
    assert main(["diff", str(source), str(target)]) == 0
    assert "equal" in capsys.readouterr().out


def test_diff_measures(payload, tmp_path, capsys):
    changed = dict(payload.tensors)
    changed["transformer_blocks.2.attn.to_q.lora_B.weight"] = -changed["transformer_blocks.2.attn.to_q.lora_B.weight"]
    other = LoRAPayload.build(changed, alphas=6.0, version=13)
    paths = [str(p.save(tmp_path / f"{i}.safetensors")) for i, p in enumerate((payload, other))]
    assert main(["diff", *paths]) == 1
    lines = capsys.readouterr().out.splitlines()
    row = next(line for line in lines if "attn.to_q" in line).split()
    assert row[1] == "4/4"
    assert float(row[-2]) == pytest.approx(2.0)  # a flipped sign: the change is twice the thing
    assert float(row[-1]) == pytest.approx(-1.0)
    calm = next(line for line in lines if "attn.to_k" in line).split()
    assert (float(calm[-2]), float(calm[-1])) == (pytest.approx(0, abs=1e-6), pytest.approx(1))


def test_errors_are_one_line_and_code_2(tmp_path, capsys):
    assert main(["inspect", str(tmp_path / "nothing.safetensors")]) == 2
    (tmp_path / "junk.safetensors").write_bytes(b"\xff" * 64)
    assert main(["inspect", str(tmp_path / "junk.safetensors")]) == 2
    err = capsys.readouterr().err.splitlines()
    assert len(err) == 2
    assert all(line.startswith("lora_sync: ") for line in err)


def test_as_a_module(payload, tmp_path):
    file = export(payload, "diffusers", tmp_path / "d")
    done = subprocess.run([sys.executable, "-m", "lora_sync", "inspect", str(file)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "format diffusers" in done.stdout
