"""One rank of the two-process test: `python gloo_worker.py RANK FOLDER` writes FOLDER/rankN.json."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from diffusion_losses import DiffusionLossConfig, diffusion_loss, known_losses

B, W = 12, 2
SPLIT = (slice(0, 10), slice(10, 12))


def draw(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def batch():
    old = draw(B, W, 3, seed=1)
    mask = draw(B, W, seed=8) > -0.8
    mask[::2] = mask[1::2]
    return old + 0.1 * draw(B, W, 3, seed=2), {
        "old_log_probs": draw(B, W, seed=3),
        "advantages": draw(B, W, seed=4),
        "old_means": old,
        "next_latents": old + draw(B, W, 3, seed=5),
        "ref_means": draw(B, W, 3, seed=6),
        "std": 0.5 + draw(B, W, seed=7).abs(),
        "sigma": torch.full((B, W), 0.8).double(),
        "sigma_next": torch.full((B, W), 0.3).double(),
        "mask": mask,
        "x0": draw(B, W, 3, seed=9),
        "noise": draw(B, W, 3, seed=10),
        "old_velocity": old,
        "ref_velocity": draw(B, W, 3, seed=11),
    }


def call(mode, rows, group=None, **extra):
    config = DiffusionLossConfig(mode, clip_ratio=0.05, ref_kl_coef=0.4, dpo_beta=2.0)
    point, data = batch()
    leaf = point.requires_grad_()
    part, mine = {key: value[rows] for key, value in data.items()}, leaf[rows]
    output = {"log_probs": part["old_log_probs"] + 0.3 * mine.mean(-1), "means": mine, "velocity": mine}
    out = diffusion_loss(config, output, {**part, **extra}, dp_group=group)
    (grad,) = torch.autograd.grad(out.loss, leaf)
    metrics = {name: value.item() for name, value in out.metrics.items()}
    return {"loss": out.loss.item(), "grad": grad.flatten().tolist(), "metrics": metrics}


def main(rank: int, folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    group, rows, whole, results = dist.group.WORLD, SPLIT[rank], slice(None), {}
    mask = batch()[1]["mask"]
    for mode in known_losses():
        count = int(mask[::2].sum() if mode == "dpo" else mask.sum())
        results[mode] = {
            "single": call(mode, whole),
            "naive": call(mode, rows),
            "reduced": call(mode, rows, group),
            "counted": call(mode, rows, group, global_count=count),
        }
    mine = mask[rows] if rank == 0 else torch.zeros_like(mask[rows])
    results["empty"] = call("flow_grpo", rows, group, mask=mine)
    results["empty"]["single"] = call("flow_grpo", SPLIT[0])["loss"]
    (folder / f"rank{rank}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
