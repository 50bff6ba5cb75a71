"""How long a step will take: operations of its phases over what the GPU was seen to do, before anything is loaded.

Each kind of pass has one share of the data sheet's peak, the same for all models and cards. They come from runs on one H200 with
Qwen-Image of full size (`docs/full_size.md`); a test compares the sums with what other models and cards were measured at.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .card_memory import KEPT, Needs
from .config import RunConfig, updates_per_step
from .model_folder import check_folder
from .placement import Placement, sleeps
from .prompts import Prompt

SHARES = {
    ("forward", True): 0.50,
    ("forward", False): 0.35,
    ("update", True): 0.42,
    ("update", False): 0.27,
}
"""Of the peak that useful and recomputed operations reach, by pass and whether blocks are compiled. An update's forwards,
recomputations and backwards together."""
APART = 0.26
"""The same of an engine's forward where the adapter's products stand outside of the compiled blocks, as in vLLM-Omni by itself:
0.82 images/s on an H200 (the first version of this program), 1.57 since they stand inside."""
HOST = 30e9
"""Bytes a second between a GPU and pinned memory of the host: an engine's 41 GB go in 1.2 s and come back in 1.5 s."""
LINK = 53e9
"""Bytes a second that a GPU gathers of a shared copy, where products do not hide it: 0.73 s for 41 GB on two H100, 1.63 s for 82 GB
on two H200."""
REST_S = 0.8
"""Seconds of a step outside rollout and update: 0.4 to 1.2 were measured."""
SYNC_S = 0.4
"""An adapter sent to an engine, bound and compared."""
BYTES_PER_TOKEN = 4.0
"""Of plain text in these tokenizers; for the time, not for limits."""
TEMPLATE = 10


@dataclass(frozen=True)
class Phase:
    """A part of a step."""

    name: str
    seconds: float
    why: str


def text_tokens(folder: Path, config: RunConfig, prompts: Sequence[Prompt]) -> int:
    """Of a usual prompt, or of every one where the model fills them up."""
    longest, pads = (
        config.rollout.pipeline.max_sequence_length,
        check_folder(folder, config.model.architecture).pads_text,
    )
    if pads is not None:
        return pads + longest
    mean = sum(len(prompt.text.encode()) for prompt in prompts) / max(len(prompts), 1)
    return min(round(mean / BYTES_PER_TOKEN) + TEMPLATE, longest)


def phases(
    config: RunConfig,
    folder: Path,
    needs: Needs,
    placed: Placement,
    text: int,
    peak: float,
    on_gpu: bool,
    reward: float = 0.0,
    apart: bool = False,
) -> list[Phase]:
    """Seconds of each phase of a step on one GPU, which all GPUs pass through together.

    Args:
        config: of the run.
        folder: of the pipeline.
        needs, placed: of `card_memory` and `placement`.
        text: tokens of a prompt.
        peak: operations a second of one GPU, from the data sheet or measured.
        on_gpu: whether blocks are compiled by default.
        reward: seconds that a reward worker takes for a picture.
        apart: the engine is vLLM-Omni as it comes, with the adapter's products outside of its compiled blocks.
    """
    spec = check_folder(folder, config.model.architecture)
    actor, rollout, loss = config.actor, config.rollout, config.actor.diffusion_loss
    drawn, ranks = rollout.pipeline, config.trainer.num_workers
    one = spec.flops(spec.transformer_config, 1, drawn, text)
    compiled = actor.fsdp_config.use_torch_compile
    compiled = on_gpu and not actor.fsdp_config.full_determinism if compiled is None else compiled
    engine = rollout.backend == "vllm_omni"
    fast = on_gpu and not rollout.vllm_omni.enforce_eager if engine else compiled
    samples = config.data.prompts_per_step * config.rows_per_prompt / ranks
    drawers = placed.engines * placed.tensor_parallel if engine and not placed.beside else ranks
    guided = 2 if drawn.true_cfg_scale > 1 else 1
    shared = placed.fsdp_size if placed.sharding == "shard" else 1
    gather = needs.base * (shared - 1) / shared / LINK
    speed = {kind: peak * share for kind, share in SHARES.items()}

    def forward(rows: float, batch: float, quick: bool = compiled) -> float:
        """Seconds of rows without gradient, in batches that gather a shared copy once each."""
        return rows * one / speed["forward", quick] + math.ceil(rows / batch) * gather

    drawing = config.data.prompts_per_step * rollout.n / drawers
    batch = (rollout.vllm_omni.max_num_seqs if engine else rollout.max_batch_size) * 1.0
    pace = peak * APART if engine and apart else speed["forward", fast]
    seconds = drawing * drawn.num_inference_steps * guided * one / pace
    if not engine:
        seconds += math.ceil(drawing / batch) * drawn.num_inference_steps * guided * gather
    why = f"{drawing:g} samples a GPU x {drawn.num_inference_steps} steps" + (
        " x 2 for guidance" if guided == 2 else ""
    )
    found = [] if config.data.offline else [Phase("rollout", seconds, why)]
    if reward and found:
        found.append(_reward(config, reward, seconds))

    steps, guides = trained_steps(config), guided if loss.spec.replays else 1
    rows = samples * steps * guides
    micro = actor.ppo_micro_batch_size_per_gpu
    scored = actor.log_prob_micro_batch_size_per_gpu or micro
    if loss.spec.replays and config.algorithm.old_log_probs == "trainer":
        again = rows
        if config.update_scores_first and config.algorithm.rollout_correction.mode == "none":
            again -= rows / updates_per_step(config)  # the first optimizer step's own forward gives them
        if again:
            found.append(Phase("old log-probs", forward(again, scored), f"{again:g} rows forward"))
    others = int(loss.reference_key is not None)
    others += int(loss.needs_old_velocity and "old" in config.model.policy_state_adapters)
    others += int(config.keeps_drew and config.drawing_state != "old")
    if others:
        found.append(
            Phase("reference", forward(others * rows * actor.ppo_epochs, scored), f"{others} more forward of each row")
        )
    recomputed = recomputed_share(config, needs, placed)
    work = (2 if config.model.lora_rank else 3) + recomputed
    updates = rows * actor.ppo_epochs
    seconds = updates * one * work / speed["update", compiled] + math.ceil(updates / micro) * 2 * gather
    why = f"{updates:g} rows forward and backward, {recomputed:.0%} of the blocks recomputed"
    found.append(Phase("update", seconds, why))
    moved = _moved(config, needs, placed, shared)
    if moved:
        found.append(Phase("to the host", 2 * moved / HOST, f"{moved / 1e9:.0f} GB a GPU away and back"))
    found.append(Phase("rest", REST_S + (SYNC_S if engine and placed.beside else 0.0), "sync, advantages, files"))
    return found


def _reward(config: RunConfig, each: float, drawing: float) -> Phase:
    """What the rewards add to a step. On GPUs or CPUs of their own they score while others are drawn, all but the last batch."""
    pools = config.reward.each.values()
    samples = config.data.prompts_per_step * config.rows_per_prompt
    total = max(samples * each / pool.num_workers for pool in pools)
    if any(pool.share_trainers_gpus for pool in pools):
        return Phase("reward", total, f"{samples} pictures on the trainers' GPUs")
    left = max(total - drawing, min(pool.batch_size for pool in pools) * each)
    return Phase(
        "reward", min(left, total), f"{samples} pictures, {total:.1f} s in all, most of it while others are drawn"
    )


def _moved(config: RunConfig, needs: Needs, placed: Placement, shared: int) -> float:
    """Bytes that leave a GPU in a step and come back: an engine that sleeps beside the trainer, and what the trainer puts away."""
    fsdp = config.actor.fsdp_config
    moved = needs.base / shared if fsdp.param_offload else 0.0
    moved += needs.moments / shared if placed.optimizer_offload or fsdp.optimizer_offload else 0.0
    if sleeps(config, placed):
        moved += needs.base / placed.tensor_parallel + needs.encoders
    return moved


def trained_steps(config: RunConfig) -> float:
    """Noise levels of each sample in one update."""
    drawn, algo = config.rollout.pipeline, config.rollout.algo
    if config.actor.diffusion_loss.spec.replays:
        first, end = algo.sde_window_range or (0, drawn.num_inference_steps - 1)
        window = algo.sde_window_size if algo.sde_window_size is not None else end - first
        return max(int(window * config.algorithm.step_fraction), 1)
    forward = config.actor.forward_process
    if forward.num_levels:
        return forward.num_levels
    return max(int(drawn.num_inference_steps * forward.schedule_fraction), 1) if forward.levels == "schedule" else 1


def recomputed_share(config: RunConfig, needs: Needs, placed: Placement) -> float:
    """Of the blocks: as `fsdp_diffusers_engine.recompute` will choose by the memory that is free, all where weights are shared."""
    model = config.model
    if not model.enable_gradient_checkpointing:
        return 0.0
    if model.recompute_blocks is not None:
        return min(model.recompute_blocks / max(needs.blocks, 1), 1.0)
    if placed.sharding == "shard" or config.actor.fsdp_config.device == "cpu" or not placed.usable:
        return 1.0
    # A block whose activations are kept holds KEPT vectors of each token, one that is recomputed one.
    passes = 2 if config.rollout.pipeline.true_cfg_scale > 1 else 1
    vectors = passes * needs.blocks
    all_kept = needs.update * (vectors + 2) * KEPT / (vectors + 2 * KEPT)
    free = placed.usable - sum(placed.parts.values()) + needs.update
    return min(max((all_kept - free) / (all_kept - needs.update), 0.0), 1.0)
