"""One FlowGRPO update (arXiv 2505.05470), top to bottom: prompts, pictures, rewards, advantages, gradient, new pictures.

    uv run examples/one_step.py

One process, no Ray, no config: the packages alone, on the tiny Qwen-Image policy that this repository ships (64x64 pixels, twenty
seconds on a CPU core). The programs under `apps/` do the same in every step, spread over processes.

One update moves the mean reward by about as much as its noise (seeds 0, 1, 2: +0.037, +0.017, -0.001). What must rise is
"advantage x log ratio": what was better than its group has become likelier.

Shapes: P prompt, G sample of a prompt, B = P * G sample, K denoising step, W trained step.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from diffusion_losses import DiffusionLossConfig, diffusion_loss, group_advantages
from image_rewards import RewardSample, load
from model_specs import get_spec_for
from peft import LoraConfig
from ray_trainer.assets import builtin
from sde_samplers import SamplerSettings, from_diffusers, initial_noise, replay, rollout, sample_generator
from torch import Tensor

SEED, PROMPTS, GROUP = 0, 6, 16  # P and G
SIZE, STEPS = 64, 6  # pixels, and K
WINDOW = (0, 1)  # the steps that inject noise and are trained; the other four follow the ODE
NOISE_LEVEL, CLIP, LEARNING_RATE = 0.7, 1e-3, 1e-3
SETTINGS = SamplerSettings(SIZE, SIZE, STEPS, kind="flow_sde", noise_level=NOISE_LEVEL, window=WINDOW)


def main(prompts_per_step: int = PROMPTS, group: int = GROUP, seed: int = SEED) -> dict[str, float]:
    """Prints and returns what a reader wants to see; the arguments make it smaller."""
    torch.manual_seed(seed)
    say: dict[str, float] = {}

    # 1. The policy: a frozen base with a LoRA, which starts as no change at all. The spec knows the architecture.
    folder = builtin("models", "tiny_qwen_image")
    spec = get_spec_for(folder)
    transformer: Any = spec.load_transformer(folder).requires_grad_(False)
    transformer.add_adapter(LoraConfig(r=16, lora_alpha=32, target_modules=list(spec.lora_targets)))
    trainable = [p for p in transformer.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=LEARNING_RATE, betas=(0.9, 0.99), weight_decay=1e-4)
    vae = spec.load_vae(folder)
    scheduler = spec.load_scheduler(folder)
    sizes = spec.schedule_kwargs(scheduler, STEPS, SIZE, SIZE)
    schedule = from_diffusers(scheduler, STEPS, **sizes)  # sigma: 1 is noise, 0 is a picture

    # 2. Prompts, each sampled G times. B rows: the G samples of prompt 0, then those of prompt 1, …
    lines = builtin("prompts", "tiny_shapes_train").read_text(encoding="utf-8").splitlines()
    chosen = torch.randperm(len(lines))[:prompts_per_step].tolist()
    rows = [json.loads(lines[i]) for i in chosen for _ in range(group)]
    uids = [f"prompt-{i}" for i in chosen for _ in range(group)]
    cond = spec.load_encoder(folder).encode([row["prompt"] for row in rows])

    def velocity(x: Tensor, sigma: Tensor) -> Tensor:
        """The network, as rollout and replay both call it: x [B, …], sigma [B] -> v [B, …]."""
        return spec.velocity(transformer, x, sigma, cond, SETTINGS)

    def draw() -> tuple[Any, Tensor, list[dict[str, float]]]:
        """Pictures of the policy as it is now: their trajectory, scores [B], and what the scores are made of."""
        # Noise belongs to a sample, (seed, uid, index), so both calls start from the same noise.
        generators = [sample_generator(seed, uid, i % group) for i, uid in enumerate(uids)]
        noise = initial_noise(generators, spec.latent_shape(SIZE, SIZE))
        trajectory = rollout(
            velocity, noise, schedule, kind="flow_sde", noise_level=NOISE_LEVEL, window=WINDOW, generators=generators
        )
        pictures = spec.decode(vae, trajectory.final, height=SIZE, width=SIZE)  # uint8 [B, 3, H, W]
        samples = [
            RewardSample(p.numpy(), row["prompt"], row["metadata"]) for p, row in zip(pictures, rows, strict=True)
        ]
        results = load("shapes").score(samples)
        return trajectory, torch.tensor([r.score for r in results]), [r.components for r in results]

    # 3. The rollout, and its rewards.
    trajectory, rewards, parts = draw()
    say["reward before"] = float(rewards.mean())
    say["strictly right before"] = sum(p["strict"] for p in parts) / len(parts)

    # 4. What is better than its group? (reward - mean) / std, each prompt for itself; equal rewards teach nothing.
    outcome = group_advantages(rewards, uids)
    advantages = outcome.advantages  # [B]

    # 5. Replay: the trained steps once more, now with gradient. For each, the log-prob of the very transition that was drawn.
    #    At the first update the weights are those of the rollout, so every ratio is exactly 1: it is the slope that counts.
    #    (The KL to the base is left out: policy and base are still one, its value and its gradient are 0.)
    loss_config = DiffusionLossConfig("flow_grpo", clip_ratio=CLIP)
    step: Any
    for w, step in enumerate(replay(velocity, trajectory, schedule, window=WINDOW)):
        policy = {"log_probs": step.log_prob}  # [B], with gradient
        old = {"old_log_probs": trajectory.log_probs[:, w], "advantages": advantages}
        counted = int(outcome.mask.sum()) * len(WINDOW)  # what the loss averages over, in all micro-batches together
        out = diffusion_loss(loss_config, policy, {**old, "mask": outcome.mask, "global_count": counted})
        out.loss.backward()  # frees this step's graph before the next is built
        say[f"largest |log ratio|, step {w}"] = float((step.log_prob.detach() - old["old_log_probs"]).abs().max())

    # 6. The update.
    say["gradient norm"] = float(torch.nn.utils.clip_grad_norm_(trainable, 1.0))
    optimizer.step()
    optimizer.zero_grad()

    # 7. What was better than its group has become likelier; and the same prompts and noise under the new weights.
    with torch.no_grad():
        scored: list[Any] = list(replay(velocity, trajectory, schedule))
    log_probs = torch.stack([step.log_prob for step in scored], dim=1)  # [B, W]
    say["advantage x log ratio"] = float((advantages[:, None] * (log_probs - trajectory.log_probs)).mean())
    again, rewards, parts = draw()
    say["reward after"] = float(rewards.mean())
    say["strictly right after"] = sum(p["strict"] for p in parts) / len(parts)
    say["latents moved by"] = float((again.final - trajectory.final).square().mean().sqrt())

    for name, value in say.items():
        print(f"{name:>32}  {value:.4g}")
    return say


if __name__ == "__main__":
    main()
