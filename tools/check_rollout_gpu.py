"""What only a GPU shows of rollout through vLLM-Omni: bf16 parity, sleep with the real allocator, times. No pytest, no network.

    python tools/check_rollout_gpu.py                                      # every model in bf16, Qwen-Image in fp32 too
    python tools/check_rollout_gpu.py --only qwen_image:float32 sd3:bfloat16
    python tools/check_rollout_gpu.py --only qwen_image:float32:2          # its engine's layers split over two GPUs
    OMNI_ROLLOUT_CPU=1 python tools/check_rollout_gpu.py --only qwen_image:float32      # the same code without a GPU

Each model is a tiny random pipeline in a process group of its own with a deadline, a few side by side on the one card. A
model draws trajectories from a `vLLMOmniHttpServer` in its process, and a trainer's transformer beside it replays them:
fp32 sampler, transformer in the engine's dtype. Prints one JSON line per result and a verdict; exit code 0 when all is good.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

CPU = os.environ.get("OMNI_ROLLOUT_CPU") == "1"
MODELS: dict[str, dict[str, Any]] = {
    "qwen_image": {},
    "sd3": {},
    "z_image": {},
    "flux": {"guidance_scale": 3.5, "true_cfg_scale": 1.0, "negative_prompt": None},
    "wan": {"num_frames": 5},
    "wan_5b": {"num_frames": 5},
}
PLAN = [f"{name}:bfloat16" for name in MODELS] + ["qwen_image:float32"]
SPLIT = [f"{name}:{dtype}:2" for name in MODELS for dtype in ("float32", "bfloat16")]
CHECKS = ("log_probs", "solvers", "lora", "full_weights", "sleep")
SIDE_BY_SIDE, EACH_S, ALL_S = (1, 280.0, 3600.0) if CPU else (4, 110.0, 232.0)
#: Largest |Δ log-prob| (mean per latent element) that passes, and largest shift of a step's mean in units of its std.
LIMITS = {"float32": (1e-5, 1e-3), "bfloat16": (5e-3, 0.3)}


def say(check: str, **values: Any) -> None:
    """One result: to standard output, or into the file that a child was given, since vLLM decorates what it prints."""
    line = json.dumps({"check": check, **values})
    if into := os.environ.get("CHECK_ROLLOUT_INTO"):
        with open(into, "a") as file:
            file.write(line + "\n")
    else:
        print(line, flush=True)


# ------------------------------------------------------------------------------------------------------------ one model


class Model:
    """A tiny pipeline, its engine and its trainer."""

    def __init__(self, name: str, dtype: Any, split: int, folder: Path) -> None:
        import diffusers
        import torch
        from model_specs import tiny
        from omni_rollout.config import DiffusionRolloutConfig, VllmOmniConfig
        from omni_rollout.vllm_omni.server import vLLMOmniHttpServer

        self.name, self.dtype, self.device = name, getattr(torch, dtype), "cpu" if CPU else "cuda"
        self.path = str(tiny.build(name, folder / "fp32"))
        if dtype != "float32":  # an engine in bf16 needs a checkpoint in bf16
            cls = json.loads((folder / "fp32" / "model_index.json").read_text())["_class_name"]
            pipeline = getattr(diffusers, cls).from_pretrained(self.path, dtype=self.dtype)
            self.path = str(folder / dtype)
            pipeline.save_pretrained(self.path)
        settings = VllmOmniConfig(
            enforce_eager=True, max_num_seqs=8, request_batch_max_wait_ms=200.0,
            tensor_model_parallel_size=split,
        )  # fmt: skip
        config = DiffusionRolloutConfig(backend="vllm_omni", dtype=dtype, vllm_omni=settings)
        self.server = vLLMOmniHttpServer(config, self.path)

    def load_trainer(self) -> None:
        """The embedded backend: the trainer's transformer, and the same requests drawn without an engine."""
        from omni_rollout.diffusers_backend import DiffusersBackend

        self.trainer = DiffusersBackend.from_pretrained(self.path, dtype=self.dtype, device=self.device)

    def requests(self, **changes: Any) -> list[Any]:
        """Two groups of four."""
        from omni_rollout.types import GenerationRequest
        from sde_samplers import SamplerSettings

        fields: dict[str, Any] = {
            "height": 64, "width": 64, "num_inference_steps": 8, "max_sequence_length": 48, "kind": "flow_sde",
            "noise_level": 0.7, "window": (1, 3, 5), "true_cfg_scale": 3.0,
        }  # fmt: skip
        adapter = changes.pop("adapter", "default")
        settings = SamplerSettings(**{**fields, **MODELS[self.name], **changes})
        prompts = ("three red circles on a black background", "one blue square")
        return [
            GenerationRequest(
                f"{self.name}-{i}",
                f"u{i // 4}",
                i % 4,
                prompts[i // 4],
                7,
                settings,
                negative_prompt="blurry",
                adapter=adapter,
            )
            for i in range(8)
        ]

    def conditions(self, samples: Any, prefix: str = "") -> Any:
        """The engine's own embeddings on the device; None where there are none."""
        from model_specs import PromptEmbeds

        names = (f"{prefix}{key}" for key in ("prompt_embeds", "prompt_embeds_mask", "pooled_prompt_embeds"))
        embeds, mask, pooled = (samples.get(name, None) for name in names)
        return None if embeds is None else PromptEmbeds(embeds, mask, pooled).to(self.device)

    def replay(self, requests: Sequence[Any], samples: Any, rows: int = 8) -> dict[str, Any]:
        """The trajectory scored by the trainer, `rows` samples at a time, against what the engine recorded."""
        import torch
        from omni_rollout.noise import generators_of
        from sde_samplers import SigmaSchedule, Trajectory, draw_noise, find_kind, initial_noise, replay

        gaps, shifts = list[Any](), list[Any]()
        for start in range(0, len(requests), rows):
            batch, part = requests[start : start + rows], samples[start : start + rows]
            settings, schedule = batch[0].settings, SigmaSchedule(part["sigmas"][0])
            names = ("latents", "next_latents", "step_index", "std")
            scores = part["rollout_log_probs"]
            trajectory = Trajectory(
                **{name: part[name].to(self.device) for name in names}, sigmas=schedule.sigmas,
                log_probs=scores, final=part["final_latents"].to(self.device), schedule_hash=schedule.hash,
                kind=settings.kind, noise_level=settings.noise_level, log_prob_form=find_kind(settings.kind).log_prob_form,
            )  # fmt: skip
            cond, negative = self.conditions(part), self.conditions(part, "negative_")

            def velocity(x: Any, sigma: Any, c: Any = cond, n: Any = negative, s: Any = settings) -> Any:
                return self.trainer.spec.velocity(self.trainer.transformer, x, sigma, c, s, n)

            # The engine's means follow from its noise, which depends on seed, uid and index alone.
            generators = generators_of(batch)
            initial_noise(generators, tuple(trajectory.final.shape[1:]))
            with torch.no_grad(), self.trainer._sampling(batch[0].adapter):
                steps = list(replay(velocity, trajectory, schedule))
            for w, step in enumerate(steps):
                assert step.log_prob is not None
                gaps.append((step.log_prob.cpu() - scores[:, w]).abs())
                std = step.std.view(-1, *[1] * (step.mean.ndim - 1))
                engine_mean = trajectory.next_latents[:, w] - std * draw_noise(step.mean, generators)
                shifts.append(((step.mean - engine_mean) / std).abs())
        gap, shift = torch.cat(gaps), torch.stack(shifts)
        return {
            "dlogp_max": float(gap.max()), "dlogp_mean": float(gap.mean()),
            "mean_shift_max_std": float(shift.max()), "mean_shift_rms_std": float(shift.square().mean().sqrt()),
        }  # fmt: skip

    def payload(self, version: int, seed: int) -> Any:
        """A random adapter on every LoRA target."""
        import torch
        from lora_sync import LoRAPayload

        generator, tensors = torch.Generator().manual_seed(seed), {}
        for module, child in self.trainer.transformer.named_modules():
            base = getattr(child, "base_layer", child)
            if isinstance(base, torch.nn.Linear) and module.endswith(self.trainer.spec.lora_targets):
                tensors[f"{module}.lora_A.weight"] = torch.randn(4, base.in_features, generator=generator) * 0.2
                tensors[f"{module}.lora_B.weight"] = torch.randn(base.out_features, 4, generator=generator) * 0.2
        return LoRAPayload.build(tensors, alphas=4.0, version=version)

    # --------------------------------------------------------------------------------------------------------- checks

    async def log_probs(self) -> dict[str, Any]:
        """Engine against trainer, in the engine's batch and one by one, for SDE and CPS steps."""
        limit, shift_limit = LIMITS[str(self.dtype).removeprefix("torch.")]
        found: dict[str, Any] = {}
        for kind in ("flow_sde", "flow_cps"):
            requests = self.requests(kind=kind)
            outputs = await self.server.generate(requests)
            found[kind] = self.replay(requests, outputs)
            found[f"{kind}_one_by_one"] = self.replay(requests, outputs, rows=1)
            found["engine_batch"] = int(outputs["batch_rows"][0])
        measured = [value for value in found.values() if isinstance(value, dict)]
        sde = [found["flow_sde"], found["flow_sde_one_by_one"]]
        good = all(value["mean_shift_max_std"] <= shift_limit for value in sde)
        # CPS scores without dividing by the variance, on a scale of its own: reported, and held to the same limit.
        return {"good": good and all(value["dlogp_max"] <= limit for value in measured), **found}

    async def solvers(self) -> dict[str, Any]:
        """DiffusionNFT's dpm2, shared noise and a Flash tail against the embedded backend; forwards counted alike."""
        found: dict[str, Any] = {"good": True}
        settings: dict[str, dict[str, Any]] = {
            "dpm2": {"kind": "ode", "window": (), "solver": "dpm2"},
            "shared_noise": {"shared_noise": True, "window": (1, 2)},
            "flash": {"window": (0, 1), "solver": "dpm2", "tail_ratio": 0.4},
        }
        for name, changes in settings.items():
            requests = self.requests(**changes)
            ours, theirs = await self.server.generate(requests), self.trainer.generate(requests)
            far = float((ours["final_latents"] - theirs["final_latents"]).abs().max())
            found[name] = {"final_latents_max": far, "forwards": float(ours["forwards"][0])}
            found["good"] &= bool((ours["forwards"] == theirs["forwards"]).all())
            found["good"] &= far <= (1e-2 if self.dtype.itemsize == 4 else 2.0)  # bf16: a rounding error may grow
        return found

    async def lora(self) -> dict[str, Any]:
        """Add, replace, a second adapter at the same version, remove; seconds of each update; parity with the adapter on."""
        from lora_sync import verify

        requests, seconds = self.requests(), []
        base = await self.server.generate(requests)
        finals, versions = [base], []
        for version in (1, 2, 3, 4):
            payload = self.payload(version, seed=version)
            start = time.perf_counter()
            verify(payload, await self.server.update_lora(payload))
            seconds.append(time.perf_counter() - start)
            if version in (1, 4):
                finals.append(await self.server.generate(requests))
                versions.append(int(finals[-1]["policy_version"][0]))
        self.trainer.update_lora(payload)
        parity = self.replay(requests, finals[-1])
        other = self.payload(4, seed=9)
        verify(other, await self.server.update_lora(other, "old"))
        finals.append(await self.server.generate(self.requests(adapter="old")))
        for adapter in ("default", "old"):
            await self.server.remove_lora(adapter)
        self.trainer.remove_lora()
        gone = await self.server.generate(requests)

        def apart(a: Any, b: Any) -> float:
            return float((a["final_latents"] - b["final_latents"]).abs().flatten(1).amax(1).min())

        changed = min(apart(finals[i], finals[j]) for i in range(4) for j in range(i))
        back = equal_pictures(base, gone)
        return {
            "good": versions == [1, 4] and changed > 1e-2 and back, "changed_at_least": changed, "base_again": back,
            "update_first_s": round(seconds[0], 4), "update_median_s": round(statistics.median(seconds[1:]), 4),
            "tensors": len(payload.tensors), "with_adapter": parity,
        }  # fmt: skip

    async def full_weights(self) -> dict[str, Any]:
        """Every tensor replaced, LoRA layers in place, proven by checksum."""
        from lora_sync import base_weights
        from lora_sync.checksum import value_sum

        named = {name: value * 1.01 for name, value in base_weights(self.trainer.transformer)}
        start = time.perf_counter()
        receipt = await self.server.update_weights(named.items(), version=20)
        seconds = time.perf_counter() - start
        # diffusers keeps a few of Wan's tensors in fp32 that the engine holds in bf16.
        sums = {value_sum(named.values()), value_sum(value.to(self.dtype) for value in named.values())}
        good = receipt.checksum in sums and receipt.tensors_bound == len(named)
        return {"good": good, "tensors": receipt.tensors_bound, "seconds": round(seconds, 3)}

    async def sleep(self) -> dict[str, Any]:
        """Level 1, refused work, and the same pictures afterwards."""
        from omni_rollout.errors import LifecycleError

        requests = self.requests()
        before, refused = await self.server.generate(requests), False
        free = [self.free_gb()]
        start = time.perf_counter()
        await self.server.sleep()
        times = [time.perf_counter() - start]
        free.append(self.free_gb())
        try:
            await self.server.generate(requests[:1])
        except LifecycleError:
            refused = True
        start = time.perf_counter()
        await self.server.wake_up()
        times.append(time.perf_counter() - start)
        after = await self.server.generate(requests)
        equal = equal_pictures(before, after)
        return {
            "good": equal and refused, "equal_pictures": equal, "refused_asleep": refused,
            "sleep_s": round(times[0], 4), "wake_up_s": round(times[1], 4), "freed_gb": round(free[1] - free[0], 4),
        }  # fmt: skip

    def free_gb(self) -> float:
        """Free memory of the card, which other models share; 0 on a CPU."""
        import torch

        return 0.0 if CPU else torch.cuda.mem_get_info()[0] / 1e9


def equal_pictures(ours: Any, theirs: Any) -> bool:
    """To the last bit."""
    return bool((ours["responses"] == theirs["responses"]).all())


async def run_one(name: str, dtype: str, split: str = "1") -> None:
    """All checks of one model; one that fails does not stop the others."""
    import torch

    torch.set_num_threads(1 if CPU else 4)
    labels = {"model": name, "dtype": dtype, "gpus": int(split)}
    with tempfile.TemporaryDirectory() as folder:
        model = Model(name, dtype, int(split), Path(folder))
        say("start", good=True, seconds=round(await model.server.launch_server(), 1), **labels)
        try:
            model.load_trainer()
            for check in CHECKS:
                try:
                    result = await getattr(model, check)()
                    say(check, **labels, **{**result, "good": bool(result["good"])})
                except Exception as error:
                    traceback.print_exc()
                    say(check, good=False, error=f"{type(error).__name__}: {error}"[:500], **labels)
        finally:
            await model.server.shutdown()


# ----------------------------------------------------------------------------------------------------------- all of them


class Child:
    """One model's process group; what it prints is kept whatever becomes of it."""

    def __init__(self, subject: str, end: float) -> None:
        self.subject, self.started = subject, time.monotonic()
        self.limit = min(self.started + EACH_S, end)
        self.out, self.err = tempfile.NamedTemporaryFile("r"), tempfile.TemporaryFile("w+")  # noqa: SIM115 - for the child
        env = {"OMP_NUM_THREADS": "1" if CPU else "4", "HF_HUB_OFFLINE": "1", **os.environ}
        env["CHECK_ROLLOUT_INTO"] = self.out.name
        env.setdefault("DIFFUSION_ATTENTION_BACKEND", "TORCH_SDPA")
        command = [sys.executable, __file__, "--one", subject]
        self.process = subprocess.Popen(command, env=env, stdout=self.err, stderr=self.err, start_new_session=True)

    def done(self) -> bool:
        """True once it ended, by itself or at its deadline."""
        if self.process.poll() is None and time.monotonic() < self.limit:
            return False
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # the whole group, which may outlive its first process
        self.process.wait()
        return True

    def results(self) -> list[dict[str, Any]]:
        """What it printed, and a failure for every check that it did not come to."""
        found: list[dict[str, Any]] = []
        name, dtype, *_ = self.subject.split(":")
        for line in self.out:
            with contextlib.suppress(ValueError):  # the last line of a child that was ended
                found.append(json.loads(line))
        missing = [check for check in ("start", *CHECKS) if check not in {result["check"] for result in found}]
        if missing:
            self.err.seek(0)
            said = [line.rstrip() for line in self.err if "%" not in line]  # without progress bars
            how = f"exit code {self.process.returncode} after {time.monotonic() - self.started:.0f} s"
            labels = {"model": name, "dtype": dtype, "missing": missing}
            found.append({"check": "ended early", "good": False, "how": how, **labels, "log": "\n".join(said)[-1500:]})
        return found


def main() -> int:
    """Run the models and print the verdict."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", nargs="+", choices=PLAN + SPLIT, default=PLAN, metavar="MODEL:DTYPE", help=", ".join(PLAN)
    )
    parser.add_argument("--one", choices=PLAN + SPLIT, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        asyncio.run(run_one(*options.one.split(":")))
        return 0
    start = time.monotonic()
    waiting, running, failed, count = list(options.only), list[Child](), list[str](), 0
    try:
        while waiting or running:
            if waiting and len(running) < SIDE_BY_SIDE and time.monotonic() < start + ALL_S:
                running.append(Child(waiting.pop(0), start + ALL_S))
            elif waiting and not running:
                break  # the time is up
            for child in [child for child in running if child.done()]:
                running.remove(child)
                for result in child.results():
                    print(json.dumps(result), flush=True)
                    count += 1
                    failed += [] if result["good"] else [f"{child.subject} {result['check']}"]
            time.sleep(0.5)
    finally:
        for child in running:
            child.limit = 0.0
            child.done()
    good = not failed and not waiting
    seconds = round(time.monotonic() - start, 1)
    say("verdict", good=good, results=count, failed=failed, not_started=waiting, seconds=seconds)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
