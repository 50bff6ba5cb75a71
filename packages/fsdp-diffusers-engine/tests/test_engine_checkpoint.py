"""Save → load → next step is bitwise the same; a checkpoint is complete or absent; only fitting ones load."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusion_losses import DiffusionLossConfig
from fsdp_diffusers_engine import CheckpointError, DiffusionLoss

LOSS = DiffusionLoss(DiffusionLossConfig(clip_ratio=1.0, ref_kl_coef=0.1))
STATES = {"policy_state_adapters": ["default", "old"]}
OPTIONS: dict[str, Any] = {
    "model": STATES,
    "engine": {"ema_decay": 0.9},
    "optim": {"lr": 1e-2, "lr_scheduler_type": "cosine", "total_training_steps": 9},
}


def update(engine: Any, data: Any) -> dict[str, float]:
    data["old_log_probs"] = torch.zeros(data.batch_size[0], 2)
    engine.forward_backward(data, LOSS)
    metrics = engine.step()
    engine.ema_update_adapter("default", "old", 0.5)
    return metrics


def everything(engine: Any) -> dict[str, torch.Tensor]:
    found = {n: p.detach().clone() for n, p in engine.module.named_parameters()}
    if engine.states is not None:
        found |= {f"{s}.{n}": t.clone() for s, c in engine.states.copies.items() for n, t in c.items()}
    for n, p in engine.trainable.items():
        found |= {f"{n}.{k}": v.clone() for k, v in engine.optimizer.state[p].items()}
    return found


@pytest.mark.parametrize("full", [False, True])
def test_next_step_is_bitwise_the_same(
    make_engine: Any, make_batch: Any, stir: Any, tmp_path: Path, full: bool
) -> None:
    options = {**OPTIONS, "model": {"policy_state_adapters": ["default", "old", "reference"]}} if full else OPTIONS
    engine = make_engine(full=full, **options)
    stir(engine)
    for seed in range(2):
        update(engine, make_batch(seed=seed))
    torch.manual_seed(5)
    random.seed(5)
    engine.save_checkpoint(tmp_path / "step_2", global_step=2)
    draws = (torch.rand(()).item(), random.random())
    metrics = update(engine, make_batch(seed=2))

    again = make_engine(full=full, **options)
    assert again.load_checkpoint(tmp_path / "step_2") == 2
    assert (torch.rand(()).item(), random.random()) == draws
    assert (again.optimizer_steps, again.lr_scheduler.last_epoch) == (2, 2)
    assert update(again, make_batch(seed=2)) == metrics
    one, two = everything(engine), everything(again)
    assert one.keys() == two.keys()
    assert [k for k in one if not torch.equal(one[k], two[k])] == []


def test_no_pickle_no_base_weights_and_nothing_half_written(
    make_engine: Any, make_batch: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(**OPTIONS)
    update(engine, make_batch())
    path = engine.save_checkpoint(tmp_path / "ck", global_step=1)
    assert {f.suffix for f in path.rglob("*") if f.is_file()} == {".json", ".safetensors"}
    adapters = sum(p.numel() * 4 for n, p in engine.module.named_parameters() if "lora_" in n)
    assert sum(f.stat().st_size for f in path.rglob("*.safetensors")) < 2.2 * adapters + 50_000
    before = (path / "engine.json").read_text()

    def dies(*_: Any, **__: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("fsdp_diffusers_engine.checkpoint.save_rng", dies)
    with pytest.raises(OSError, match="disk full"):
        engine.save_checkpoint(tmp_path / "ck", global_step=2)
    with pytest.raises(OSError, match="disk full"):
        engine.save_checkpoint(tmp_path / "new", global_step=2)
    assert (path / "engine.json").read_text() == before
    assert not (tmp_path / "new").exists()
    monkeypatch.undo()
    engine.save_checkpoint(tmp_path / "ck", global_step=3)
    assert json.loads((path / "engine.json").read_text())["global_step"] == 3
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == [".new.writing"]


def test_what_does_not_fit_is_refused(make_engine: Any, make_batch: Any, tmp_path: Path) -> None:
    engine = make_engine(**OPTIONS)
    update(engine, make_batch())
    path = engine.save_checkpoint(tmp_path / "ck", global_step=1)
    with pytest.raises(CheckpointError, match="'ck'"):
        engine.load_checkpoint(tmp_path / "kc")
    with pytest.raises(CheckpointError, match="LoRA"):
        make_engine(model={"lora_rank": 8}).load_checkpoint(path)
    with pytest.raises(CheckpointError, match="other policy states"):
        make_engine(model={"policy_state_adapters": ["default", "older"]}).load_checkpoint(path)
    with pytest.raises(CheckpointError, match="other policy states or targets"):
        make_engine(model={"target_modules": ["to_q", "img_in"]}).load_checkpoint(path)
    with pytest.raises(CheckpointError, match="they would be lost"):
        make_engine(model={"target_modules": ["to_q"]}).load_checkpoint(path)
    for file in (path / "weights").iterdir():
        file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match="damaged"):
        make_engine(**OPTIONS).load_checkpoint(path)
    light = make_engine(checkpoint={"save_contents": ["model"]})
    light.save_checkpoint(tmp_path / "light")
    with pytest.raises(CheckpointError, match=r"holds \['model'\] and lacks \['extra', 'optimizer'\]"):
        engine.load_checkpoint(tmp_path / "light")
