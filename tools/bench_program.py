"""Parts of `bench_gpu.py`: `apps/flowgrpo` itself, with shared weights and with an engine, told by its own metrics."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from bench_common import CPU, Report
from bench_engine import PIPELINE
from bench_model import PROMPT, Size, transformer_config

FLOWGRPO = Path(__file__).resolve().parent.parent / "apps" / "flowgrpo"
ENGINE = (
    "rollout.backend=vllm_omni", f"rollout.vllm_omni.enforce_eager={str(CPU).lower()}",
    f"rollout.vllm_omni.engine_kwargs={{custom_pipeline_args: {{pipeline_class: {PIPELINE}}}}}",
)  # fmt: skip
ASLEEP = (*ENGINE, "rollout.vllm_omni.enable_sleep_mode=true")
"""An engine: on a card of its own where there are two, else asleep during updates."""
AWAKE = (*ENGINE, "rollout.vllm_omni.enable_sleep_mode=false")
"""An engine that never sleeps and borrows the trainer's frozen weights."""


def command(size: Size, folder: Path, work: Path, *keys: str, steps: int = 4, workers: int = 1) -> list[str]:
    """`apps/flowgrpo` with the folder's model, its prompts and its run in `work`; each worker has as much to do as one alone."""
    (work / "train.jsonl").write_text("".join(json.dumps({"prompt": PROMPT + str(i)}) + "\n" for i in range(16)))
    (work / "val.jsonl").write_text(json.dumps({"prompt": PROMPT + "99"}) + "\n")
    pixels, batch = size.pixels, size.batch
    return [
        sys.executable, str(FLOWGRPO), "recipe=tiny_flow_grpo", f"model.path={folder}",
        "model.architecture=qwen_image", f"model.lora_rank={size.rank}", f"model.lora_alpha={2 * size.rank}",
        "model.target_modules=attention", "model.enable_gradient_checkpointing=true",
        f"model.transformer_config={json.dumps(transformer_config(folder)).replace(' ', '')}",
        f"actor.fsdp_config.model_dtype={'fp32' if CPU else 'bf16'}", f"rollout.dtype={'float32' if CPU else 'bfloat16'}",
        "actor.diffusion_loss.ref_kl_coef=0", f"actor.ppo_mini_batch_size={workers * batch}",
        f"actor.ppo_micro_batch_size_per_gpu={size.micro}", f"rollout.pipeline.height={pixels}",
        f"rollout.pipeline.width={pixels}", f"rollout.pipeline.num_inference_steps={size.steps}",
        "rollout.pipeline.true_cfg_scale=4.0", "rollout.pipeline.max_sequence_length=256",
        "rollout.algo.sde_window_size=2", f"rollout.algo.sde_window_range=[0,{size.steps // 2}]", f"rollout.n={batch}",
        f"rollout.max_batch_size={batch}", f"data.prompts_per_step={2 * workers}", f"data.train_file={work}/train.jsonl",
        f"data.val_file={work}/val.jsonl", "data.val_max_prompts=1", "rollout.val_kwargs.n=1",
        f"rollout.val_kwargs.pipeline.height={pixels}", f"rollout.val_kwargs.pipeline.width={pixels}",
        "rollout.val_kwargs.pipeline.num_inference_steps=2", "reward.name=jpeg_compressibility", "reward.num_workers=2",
        f"trainer.total_steps={steps}", f"trainer.num_workers={workers}", "trainer.val_before_train=false", "trainer.val_every=0",
        f"trainer.run_dir={work}/run", "trainer.on_existing=delete", "trainer.save_every=0", "ray.object_store_mb=2048", *keys,
    ]  # fmt: skip


def program(*keys: str, **options: int) -> Callable[[Size, Path, Report], None]:
    """A part: the program with more keys, or another number of steps or workers."""
    return partial(_program, keys=keys, options=options)


def _program(size: Size, folder: Path, report: Report, keys: tuple[str, ...], options: dict[str, int]) -> None:
    with tempfile.TemporaryDirectory() as made:
        work = Path(made)
        start = time.perf_counter()
        # Its words go to this part's log as they come.
        running = subprocess.Popen(command(size, folder, work, *keys, **options))
        metrics, told = work / "run" / "metrics.jsonl", 0
        while True:  # a step is reported when it is done, so that a run cut short still says what it measured
            ended = running.poll() is not None
            lines = metrics.read_text().splitlines(keepends=True)[told:] if metrics.exists() else []
            for line in (each for each in lines if each.endswith("\n")):
                row = json.loads(line)
                shown = ("time/", "perf/", "sync/", "forwards/")
                kept = {k: v for k, v in row.items() if k.startswith(shown) or k == "actor/rollout_log_prob_diff_max"}
                report(f"step {row.get('step')}", after=time.perf_counter() - start, **kept)
                told += 1
            if ended:
                break
            time.sleep(0.2)
        if running.returncode:
            raise RuntimeError(f"exit {running.returncode}; this part's log says why")
        report("whole run", seconds=time.perf_counter() - start)
