"""Parts of `bench_gpu.py`: the trainer's own rollout, replay and update, on one card and over several; stock diffusers beside."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench_common import CPU, Report, apart, device, now, peak_gb, timed
from bench_model import (
    Size,
    drawn_with,
    empty_transformer,
    make_payload,
    requests,
    tflop,
    trainer_engine,
    training_batch,
    transformer_config,
)
from bench_variants import uncompiled

TEXT = 75
"""Tokens of a prompt, where it is made up."""


@dataclass
class Own:
    """The trainer's engine and the backend that samples with its weights."""

    size: Size
    engine: Any
    backend: Any
    report: Report
    rounds: Iterator[int]

    @classmethod
    def build(cls, size: Size, folder: Path, report: Report) -> Own:
        """Random weights, an adapter that is not zero."""
        import torch
        from lora_sync import apply_lora
        from omni_rollout.diffusers_backend import DiffusersBackend

        start = now()
        engine = trainer_engine(transformer_config(folder), size.rank, path=folder)
        report("start", seconds=now() - start, weights_gb=peak_gb())
        apply_lora(engine.module, make_payload(size, folder, 3), "default")
        spec, where = engine.spec, (folder, torch.float32 if CPU else torch.bfloat16, device())
        parts = spec.load_encoder(*where), spec.load_vae(*where), spec.load_scheduler(folder)
        options = {"max_batch_size": size.batch, "device": device(), "adapter_ctx": engine.use_adapter}
        return cls(size, engine, DiffusersBackend(spec, engine.module, *parts, **options), report, iter(range(1, 1000)))

    def replay(self, samples: Any) -> Any:
        """The trainer's log-probs of samples."""
        from fsdp_diffusers_engine import gather_outputs

        with self.engine.eval_mode():
            outputs = self.engine.forward_backward_batch(samples, None, forward_only=True)
            return gather_outputs(outputs)["log_probs"].cpu()

    def floor(self, samples: Any, most: float = 5e-3) -> dict[str, Any]:
        """How far the trainer's log-probs are from those of who drew; the share of the samples that corrected weights leave."""
        drawn = samples["rollout_log_probs"]
        off = self.replay(training_batch(samples, self.size, drawn)) - drawn
        weights = off.double().exp()
        return {
            "largest_log_prob_gap": float(off.abs().max()),
            "mean_log_prob_gap": float(off.abs().mean()),
            "effective_share": float(weights.sum() ** 2 / weights.square().sum() / weights.numel()),
            "good": bool(off.abs().max() < most),
        }

    def rollout(self, what: str) -> Any:
        """Draw a batch twice and report the second; its samples."""

        def draw() -> tuple[Any, float]:
            start = now()
            with self.engine.eval_mode():
                samples = self.backend.generate(requests(self.size, self.size.batch, next(self.rounds)))
            return samples, now() - start

        _, first = draw()
        before = dict(self.backend.health().seconds)
        samples, seconds = draw()
        phases = {f"{k}_s": v - before[k] for k, v in self.backend.health().seconds.items() if k != "sync"}
        phases["others_s"] = seconds - sum(phases.values())
        speed = {"images_per_s": self.size.batch / seconds, "first_s": first, "seconds": seconds}
        self.report(what, **speed, **phases, peak_gb=peak_gb())
        return samples


def rollouts(size: Size, folder: Path, report: Report) -> None:
    """The trainer's own rollout in each way that there is, and how far its log-probs are from the trainer's."""
    own = Own.build(size, folder, report)
    for fp8, merged in ((False, False), (True, False), (True, True), (False, True)):
        what = f"rollout{', fp8' if fp8 else ''}{', adapter merged' if merged else ''}"
        with report.section(what, 30) as go:
            if not go or (CPU and fp8):
                continue
            if merged:
                own.engine.model_config.lora.merge = True
                named, _ = own.engine.get_per_tensor_param(layered_summon=True, adapter_name="default")
                start = now()
                own.backend.hold_weights(named, next(own.rounds), fold=True)
                report(f"merging{', fp8' if fp8 else ''}", seconds=now() - start)
            own.backend.fp8 = fp8
            samples = own.rollout(what)
            report(f"log-prob floor, {what}", **own.floor(samples, 0.1 if fp8 or merged else 5e-3))
            own.backend._weights._folded.clear()


def trainer(size: Size, folder: Path, report: Report) -> None:
    """The trainer's own rollout, replay and update on one set of weights."""
    import torch
    from diffusion_losses import DiffusionLossConfig
    from fsdp_diffusers_engine import DiffusionLoss
    from lora_sync import apply_lora
    from tensordict import TensorDict

    own = Own.build(size, folder, report)
    engine = own.engine
    samples = own.rollout("rollout")
    data = training_batch(samples, size, samples["rollout_log_probs"])
    report("log-prob floor of the own rollout", **own.floor(samples))
    seconds, _ = timed(lambda: own.replay(data), 1)
    texts = samples["prompt_embeds"].shape[1], samples["negative_prompt_embeds"].shape[1]
    work = 2 * sum(tflop(size, folder, len(samples), text) for text in texts)  # two trained steps
    report("replay", seconds=seconds, tflops=work / seconds, images_per_s=len(samples) / seconds)

    loss = DiffusionLoss(DiffusionLossConfig(clip_ratio=1.0))
    names = [name for name in engine.trainable if ".to_q." in name and "lora_B" in name][:8]
    wanted: dict[str, Any] = {}

    def update(what: str, batch: Any = data, recompute: int | None = None, repeat: int = 2) -> None:
        engine.recompute.chosen.clear()
        engine.recompute.count = recompute
        engine.optimizer_zero_grad()
        peak_gb()

        def step() -> None:
            engine.optimizer_zero_grad()
            engine.forward_backward(batch, loss)

        seconds, first = timed(step, repeat)
        found = {name: engine.trainable[name].grad.clone() for name in names}
        wanted.update({} if wanted else found)
        chosen = sorted(set(engine.recompute.chosen.values())) if recompute is None else [recompute]
        off, graphs = apart(found, wanted), torch._dynamo.utils.counters["stats"]["unique_graphs"]
        values = {"recomputed": chosen, "gradient_off_by": off, "graphs": graphs}
        share = {"useful_tflops": 2 * work * len(batch) / len(samples) / seconds, "peak_gb": peak_gb()}
        report(what, seconds=seconds, first_s=first, good=off < 0.15, **values, **share)

    with report.section("update, as many recomputed as memory asks"):
        update("update, as many recomputed as memory asks")
        start = now()
        engine.step()
        report("optimizer step", seconds=now() - start)
    apply_lora(engine.module, make_payload(size, folder, 3), "default")
    for file in sorted(folder.glob("engine_samples*.pt")):
        name = file.stem.removeprefix("engine_samples").replace("_", ", ", 1)
        with report.section(f"log-prob floor of the engine's rollout{name}"):
            theirs = TensorDict(torch.load(file), batch_size=[2 * size.batch])[: size.batch]
            report(f"log-prob floor of the engine's rollout{name}", **own.floor(theirs, 0.1 if "fp8" in name else 5e-3))
    every = len(engine.blocks)
    with report.section("update, all recomputed", 60) as go:
        if go:
            update("update, all recomputed", recompute=every, repeat=1)
    with report.section("update, all recomputed, masked attention", 60) as go:
        if go:
            masked, pad = data.clone(), torch.nn.functional.pad
            masked["prompt_embeds"] = pad(data["prompt_embeds"], (0, 0, 0, 1))
            masked["prompt_embeds_mask"] = pad(data["prompt_embeds_mask"], (0, 1))
            masked["prompt_embeds_mask"][:: size.micro, -1] = True  # one longer row in each micro-batch
            update("update, all recomputed, masked attention", masked, recompute=every, repeat=1)
    with report.section("not compiled", 75) as go, uncompiled(engine):
        if go:
            update("update, not compiled, all recomputed", recompute=every, repeat=1)
            own.rollout("rollout, not compiled")


def ranks(size: Size, folder: Path, report: Report) -> None:
    """The update over several processes; each of them runs this, rank 0 reports."""
    import torch
    import torch.distributed as dist
    from diffusion_losses import DiffusionLossConfig
    from fsdp_diffusers_engine import DiffusionLoss
    from fsdp_diffusers_engine.sharding import Layout, average_gradients
    from tensordict import TensorDict

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if not CPU:
        torch.cuda.set_device(rank)
    dist.init_process_group("gloo" if CPU else "cpu:gloo,cuda:nccl")
    waiting = dist.new_group(backend="gloo")  # waits on the host: the card stays free
    draw = torch.Generator().manual_seed(0)
    config, count = transformer_config(folder), 2 * size.micro * world
    latents = torch.randn(count, 1, (size.pixels // 16) ** 2, 64, generator=draw)
    data = TensorDict(
        {
            "latents": latents, "next_latents": latents + 0.05 * torch.randn(latents.shape, generator=draw),
            "step_index": torch.zeros(count, 1, dtype=torch.long), "sigmas": torch.linspace(1, 0, 11).expand(count, -1),
            "advantages": torch.randn(count, generator=draw), "old_log_probs": torch.zeros(count, 1),
            "prompt_embeds": torch.randn(count, TEXT, config["joint_attention_dim"], generator=draw),
            "prompt_embeds_mask": torch.ones(count, TEXT, dtype=torch.bool),
        },
        batch_size=[count],
    )  # fmt: skip
    data.set_non_tensor("settings", drawn_with(size))
    data.set_non_tensor("micro_batch_size", size.micro)
    loss = DiffusionLoss(DiffusionLossConfig(clip_ratio=1e9))
    for what, sharding in (("replicated", "replicate"), ("sharded", "shard")):
        engine = trainer_engine(config, size.rank, path=folder, sharding=sharding)
        part = data[engine.layout.dp_rank :: world]
        found: list[float] = []

        def step(engine: Any = engine, part: Any = part, found: list[float] = found) -> None:
            engine.forward_backward(part, loss)
            found.append(engine.step()["actor/grad_norm"])

        seconds, first = timed(step, 5)
        parameters = list(engine.trainable.values())
        shares: dict[str, float] = {}
        if not engine.layout.sharded:  # the exchange; this rank's own work, beside the other ranks' and while they wait
            engine.forward_backward(part, loss)
            shares = {"exchange_gb": sum(p.numel() * p.element_size() for p in parameters) / 1e9}
            shares["exchange_s"], _ = timed(lambda e=engine, p=parameters: average_gradients(p, e.layout))  # type: ignore[misc]
            whole, engine.layout = engine.layout, Layout()
            shares["own_work_s"], _ = timed(step)
            dist.barrier(waiting)
            if rank == 0:
                shares["own_work_alone_s"], _ = timed(step)
            dist.barrier(waiting)
            engine.layout = whole
        if not CPU:
            shares["alloc_retries"] = torch.cuda.memory_stats()["num_alloc_retries"]
        work = 2 * tflop(size, folder, count, TEXT)
        chosen = sorted(set(engine.recompute.chosen.values()))
        if rank == 0:
            values = {"seconds": seconds, "first_s": first, "useful_tflops_each": work / seconds / world, **shares}
            report(f"update, {what}", ranks=world, **values, recomputed=chosen, grad_norm=found[0], peak_gb=peak_gb())
        del engine
        if not CPU:
            torch.cuda.empty_cache()
    dist.destroy_process_group()


def plain(size: Size, folder: Path, report: Report) -> None:
    """Stock diffusers and PEFT, as a script would use them."""
    import torch
    from fsdp_diffusers_engine.loading import RandomSource
    from model_specs import get_spec
    from peft import LoraConfig

    config, dtype = transformer_config(folder), torch.float32 if CPU else torch.bfloat16
    module, source = (
        empty_transformer(folder).to(dtype).to_empty(device=device()),
        RandomSource(0, torch.device(device())),
    )
    with torch.no_grad():
        for name, p in module.named_parameters():
            p.copy_(source.read(name, tuple(p.shape), tuple(slice(None) for _ in p.shape)))
    module.pos_embed.__init__(theta=10000, axes_dim=config["axes_dims_rope"], scale_rope=True)
    module.requires_grad_(False)
    targets = list(get_spec("qwen_image").attention_targets)
    module.add_adapter(LoraConfig(r=size.rank, lora_alpha=2 * size.rank, target_modules=targets))
    for p in module.parameters():
        if p.requires_grad:
            p.data = p.data.float()
    side = size.pixels // 16

    def inputs(rows: int) -> dict[str, Any]:
        def draw(*shape: int) -> Any:
            return torch.randn(rows, *shape, device=device(), dtype=dtype)

        return {
            "hidden_states": draw(side**2, 64), "encoder_hidden_states": draw(TEXT, config["joint_attention_dim"]),
            "timestep": torch.full((rows,), 0.5, device=device(), dtype=dtype), "return_dict": False,
            "encoder_hidden_states_mask": torch.ones(rows, TEXT, device=device(), dtype=torch.bool),
            "img_shapes": [[(1, side, side)]] * rows,
        }  # fmt: skip

    autocast = torch.autocast(device(), torch.bfloat16, enabled=not CPU)
    batch = inputs(size.batch)
    with torch.no_grad(), autocast:
        good = bool(module(**batch)[0].isfinite().all())
        forward, _ = timed(lambda: module(**batch))
    report("forward", seconds=forward, tflops=tflop(size, folder, size.batch, TEXT) / forward, good=good)
    report("rollout", images_per_s=size.batch / (2 * size.steps * forward), note="forwards alone")
    module.enable_gradient_checkpointing()
    module.train()
    batch = inputs(size.micro)

    def update() -> None:
        with autocast:
            loss = module(**batch)[0].float().square().mean()
        loss.backward()

    seconds, _ = timed(update)
    work, step = (
        2 * tflop(size, folder, size.micro, TEXT),
        2 * size.steps * forward / size.batch + 4 * seconds / size.micro,
    )
    report("update", seconds=seconds, useful_tflops=work / seconds, peak_gb=peak_gb())
    report("step", images_per_s=1 / step, note="rollout + update")
