"""The first sync of a run finds a base that is not the trainer's, where a picture would only look a little worse."""

import asyncio
import os
import shutil
from importlib.resources import files
from pathlib import Path

import pytest
import torch
from lora_sync import WrongBaseError
from omni_rollout.fleet import Fleet
from ray_trainer.assets import builtin
from ray_trainer.compose import compose
from ray_trainer.workers import ActorRolloutRefWorker
from safetensors.torch import load_file, save_file


@pytest.fixture
def worker(tmp_path):
    """The hybrid worker of the laptop's job, and the folder that its model comes from."""
    folder = shutil.copytree(builtin("models", "tiny_qwen_image"), tmp_path / "model")
    config = compose(
        "flowgrpo", Path(str(files("flowgrpo"))) / "recipes" / "tiny_flow_grpo.yaml", [f"model.path={folder}"]
    )
    worker = ActorRolloutRefWorker(config)
    worker.init_model()
    return worker, folder


def disturb(tensor):
    """Another fine-tune: same names, same shapes."""
    return tensor * 1.1


def test_hybrid(worker):
    worker, _ = worker
    assert worker.update_weights(1)["sync/version"] == 1
    other = ActorRolloutRefWorker(worker.config)
    other.init_model()
    with torch.no_grad():
        weight = other.engine.module.proj_out.weight
        weight.copy_(disturb(weight))
    _, payload = worker.lora_payload("default", 1)
    with pytest.raises(WrongBaseError, match="Load the base checkpoint that the trainer started from"):
        other.backend.update_lora(payload)  # the adapter is the same to the bit: both are drawn from one seed


def test_fleet(worker):
    """The folder was changed between the trainer's start and the replica's."""
    import ray

    worker, folder = worker
    _, payload = worker.lora_payload("default", 1)
    file = folder / "transformer" / "diffusion_pytorch_model.safetensors"
    right = load_file(file)
    save_file({**right, "proj_out.weight": disturb(right["proj_out.weight"])}, file, metadata={"format": "pt"})
    os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"
    started = not ray.is_initialized()  # another test's Ray will do
    if started:
        ray.init("local", num_cpus=2, log_to_driver=False, include_dashboard=False)
    try:

        async def sync():
            fleet = await Fleet.launch(worker.config.rollout, str(folder), cpus=0.25)
            try:
                await fleet.update_lora(payload)
            finally:
                await fleet.close()

        with pytest.raises(WrongBaseError, match=f"was trained on {payload.base_fingerprint}"):
            asyncio.run(sync())
    finally:
        if started:
            ray.shutdown()
