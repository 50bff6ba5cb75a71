"""Runs the scenarios of `test_engine_ranks.py` on 1, 2 and 4 gloo ranks and leaves what each rank found in files.

A script of its own: it imports once and forks the ranks, so that eight processes cost one import. The parent computes
nothing (a fork after autograd has started threads is refused by torch). Usage: `ranks.py OUT QWEN_FOLDER WAN_FOLDER`.
With `ENGINE_TEST_DEVICE=cuda` each rank has a GPU and they talk through NCCL; groups larger than the machine are left
out, and a rank is a process of its own (`… GROUP RANK`), for CUDA refuses to be forked.
"""

from __future__ import annotations

import datetime
import importlib.util
import itertools
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsdp_diffusers_engine.failures as failures
import fsdp_diffusers_engine.loading as loading
import torch
import torch.distributed as dist
import torch.distributed.checkpoint.hf_storage
from diffusers import QwenImageTransformer2DModel, WanTransformer3DModel  # noqa: F401 - for the children
from diffusion_losses import DiffusionLossConfig
from fsdp_diffusers_engine import DiffusionLoss, ForwardProcessConfig, MixedPrecisionConfig, reduce_metrics
from lora_sync import extract_lora, layers

SPEC = importlib.util.spec_from_file_location("engine_conftest", Path(__file__).with_name("conftest.py"))
assert SPEC is not None
assert SPEC.loader is not None
HELP = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(HELP)
OUT, QWEN, WAN = (Path(p) for p in sys.argv[1:4]) if __name__ == "__main__" else (Path(), Path(), Path())
CUDA = HELP.DEVICE == "cuda"
DEADLINE_S = 150.0 if CUDA else 100.0
SPLITS = {1: {"even": (4,), "uneven": (5,)}, 2: {"even": (2, 2), "uneven": (1, 4)}, 4: {"uneven": (1, 1, 2, 1)}}


def share(data: Any, sizes: tuple[int, ...], rank: int) -> Any:
    start = sum(sizes[:rank])
    return data[start : start + sizes[rank]]


def stir(engine: Any) -> None:
    """The same push as the fixture's, by whole tensors, so that it does not depend on the sharding."""
    draw = torch.Generator().manual_seed(1)
    for parameter in engine.trainable.values():
        push = 0.05 * torch.randn(parameter.shape, generator=draw)
        layers.copy_into(parameter, layers.full(parameter).cpu() + push)


def snapshot(engine: Any, metrics: dict[str, float]) -> dict[str, Any]:
    grads = {n: p.grad for n, p in engine.trainable.items() if p.grad is not None}
    found = {"grads": {n: layers.full(g).clone() for n, g in grads.items()}, "metrics": metrics}
    found["norm"] = engine.optimizer_step()
    found["clipped"] = {n: layers.full(g).clone() for n, g in grads.items()}
    found["weights"] = {n: layers.full(p).clone() for n, p in engine.trainable.items()}
    return found


def update(engine: Any, data: Any, config: DiffusionLossConfig) -> dict[str, Any]:
    engine.optimizer_zero_grad()
    return snapshot(engine, reduce_metrics(engine.forward_backward(data, DiffusionLoss(config))))


def qwen_batch(kind: str) -> Any:
    data = HELP.build_batch((4, 64), count=4 if kind == "even" else 5)
    data["old_log_probs"] = torch.zeros(data.batch_size[0], 2)
    data.set_non_tensor("noise_seed", 7)
    return data


CLIPPED = {"lr": 1e-4, "clip_grad": 0.001}
FEW = {"target_modules": ["to_q", "add_k_proj", "img_mlp.net.2"]}
"""A layer of pictures, one of text and one behind both: gathering every adapter's tensors is what takes long."""


def lora(rank: int, world: int, kind: str, **options: Any) -> dict[str, Any]:
    engine = HELP.build_engine(QWEN, model=FEW, **{"optim": {"lr": 1e-4}, **options})
    stir(engine)
    found = update(
        engine, share(qwen_batch(kind), SPLITS[world][kind], rank), DiffusionLossConfig(clip_ratio=9.0, ref_kl_coef=0.5)
    )
    found["payload"] = dict(extract_lora(engine.module, "default", version=1).tensors)
    stream, config = engine.get_per_tensor_param(base_sync_done=True, layered_summon=True)
    found["stream"] = dict(stream)
    assert config is not None
    return found


def lora_even(rank: int, world: int) -> Any:
    return lora(rank, world, "even")


def whole_copies(rank: int, world: int) -> Any:
    """Every rank holds the whole transformer, and only the adapter's gradient crosses ranks, all of it at once."""
    sent: list[int] = []
    reduce = dist.all_reduce

    def counted(tensor: Any, *arguments: Any, **named: Any) -> Any:
        sent.append(tensor.numel())
        return reduce(tensor, *arguments, **named)

    dist.all_reduce = counted
    try:
        found = lora(rank, world, "uneven", engine={"sharding": "replicate"}, optim=CLIPPED)
    finally:
        dist.all_reduce = reduce
    return found | {"sent": sent}


def whole_copies_full(rank: int, world: int) -> Any:
    states = {"policy_state_adapters": ["default", "reference"]}
    engine = HELP.build_engine(QWEN, full=True, model=states, optim={"lr": 1e-4}, engine={"sharding": "replicate"})
    stir(engine)
    data = share(qwen_batch("uneven"), SPLITS[world]["uneven"], rank)
    return update(engine, data, DiffusionLossConfig(clip_ratio=9.0, ref_kl_coef=0.5))


def whole_copies_save(rank: int, world: int) -> Any:
    """One rank writes what all of them hold; then each goes on from it."""
    engine, data = resumable(sharding="replicate"), share(qwen_batch("uneven"), SPLITS[world]["uneven"], rank)
    update(engine, data, RESUME)
    engine.save_checkpoint(OUT / f"whole_copies_{world}", global_step=1)
    expected = update(engine, data, RESUME)
    engine = resumable(sharding="replicate")
    engine.load_checkpoint(OUT / f"whole_copies_{world}")
    return expected | {"loaded": update(engine, data, RESUME)["weights"]}


def lora_uneven(rank: int, world: int) -> Any:
    if world == 4:
        return lora(rank, world, "uneven", engine={"fsdp_size": 2}, optim=CLIPPED)
    sooner = {"forward_prefetch": True, "reshard_after_forward": False}
    return lora(rank, world, "uneven", engine=sooner, optim=CLIPPED)


def full(rank: int, world: int) -> Any:
    """Full fine-tuning, and that a rank reads no more of the file than its shard."""
    read, original = [0], loading.SafetensorsSource.read

    def counting(self: Any, name: str, shape: Any, index: Any) -> Any:
        part = original(self, name, shape, index)
        read[0] += part.numel()
        return part

    loading.SafetensorsSource.read = counting  # type: ignore[method-assign]
    states = {"policy_state_adapters": ["default", "reference"]}
    engine = HELP.build_engine(QWEN, full=True, model=states, engine={"ema_decay": 0.5}, optim={"lr": 1e-4})
    loading.SafetensorsSource.read = original  # type: ignore[method-assign]
    total = sum(p.numel() for p in engine.module.parameters())
    data = share(qwen_batch("uneven"), SPLITS[world]["uneven"], rank)
    stir(engine)
    found = update(engine, data, DiffusionLossConfig(clip_ratio=9.0, ref_kl_coef=0.5))
    stream, _ = engine.get_per_tensor_param(adapter_name="ema")
    return found | {"stream": dict(stream), "read": read[0] / total}


def mixed(rank: int, world: int) -> Any:
    """Full fine-tuning that computes in bf16 and keeps fp32 weights; one rank shards alone to get the same policy."""
    engine = HELP.build_engine(
        QWEN,
        full=True,
        optim={"lr": 1e-4},
        engine={"mixed_precision": MixedPrecisionConfig(), "sharding": "auto" if world > 1 else "shard"},
    )
    data = share(qwen_batch("even"), SPLITS[world]["even"], rank)
    found = update(engine, data, DiffusionLossConfig(clip_ratio=9.0))
    return found | {"stored": sorted({str(p.dtype) for p in engine.trainable.values()})}


def forward_process(rank: int, world: int) -> Any:
    engine = HELP.build_engine(
        QWEN,
        "forward_process",
        model=FEW,
        optim={"lr": 1e-4},
        forward=ForwardProcessConfig(levels="uniform", num_levels=2),
    )
    stir(engine)
    data = share(qwen_batch("uneven"), SPLITS[world]["uneven"], rank)
    return update(engine, data, DiffusionLossConfig(loss_mode="diffusion_nft"))


def preference(rank: int, world: int) -> Any:
    """Preference pairs: one rank has one, the other two."""
    engine = HELP.build_engine(
        QWEN,
        "forward_process",
        model=FEW,
        optim={"lr": 1e-4},
        forward=ForwardProcessConfig(levels="uniform", num_levels=2),
    )
    stir(engine)
    data = HELP.build_batch((4, 64), count=6)
    data.set_non_tensor("noise_seed", 7)
    return update(
        engine, share(data, (2, 4) if world == 2 else (6,), rank), DiffusionLossConfig(loss_mode="dpo", dpo_beta=5.0)
    )


def experts(rank: int, world: int) -> Any:
    """Wan's two experts: the first step of the window belongs to one, the second to the other."""
    engine = HELP.build_engine(WAN, optim={"lr": 1e-4})
    stir(engine)
    data = HELP.build_batch((16, 1, 4, 4), count=5)
    data["prompt_embeds_mask"] = torch.ones(5, 7, dtype=torch.bool)  # Wan has no text mask
    data["old_log_probs"] = torch.zeros(5, 2)
    return update(
        engine, share(data, SPLITS[world]["uneven"], rank), DiffusionLossConfig(clip_ratio=9.0, ref_kl_coef=0.5)
    )


def experts_apart(rank: int, world: int) -> Any:
    """Wan's two experts with a noise level for each sample: whole copies on two ranks may enter different ones at a time."""
    levels = ForwardProcessConfig(levels="uniform", num_levels=2)
    engine = HELP.build_engine(
        WAN, "forward_process", optim={"lr": 1e-4}, engine={"sharding": "replicate"}, forward=levels
    )
    stir(engine)
    data = HELP.build_batch((16, 1, 4, 4), count=5)
    data["prompt_embeds_mask"] = torch.ones(5, 7, dtype=torch.bool)  # Wan has no text mask
    data.set_non_tensor("noise_seed", 7)
    return update(engine, share(data, SPLITS[world]["uneven"], rank), DiffusionLossConfig(loss_mode="diffusion_nft"))


def sequence(rank: int, world: int) -> Any:
    """Two ranks share the tokens of the same samples."""
    engine = HELP.build_engine(QWEN, model=FEW, optim={"lr": 1e-4}, engine={"ulysses_sequence_parallel_size": world})
    stir(engine)
    return update(engine, qwen_batch("even"), DiffusionLossConfig(clip_ratio=9.0, ref_kl_coef=0.5))


def sequence_whole(rank: int, world: int) -> Any:
    """The same with a whole copy on each."""
    options = {"ulysses_sequence_parallel_size": world, "sharding": "replicate"}
    engine = HELP.build_engine(QWEN, model=FEW, optim={"lr": 1e-4}, engine=options)
    stir(engine)
    return update(engine, qwen_batch("even"), DiffusionLossConfig(clip_ratio=9.0, ref_kl_coef=0.5))


def save(rank: int, world: int) -> Any:
    """Train, save, train once more."""
    engine = resumable()
    update(engine, share(qwen_batch("uneven"), SPLITS[world]["uneven"], rank), RESUME)
    engine.save_checkpoint(OUT / f"saved_by_{world}", global_step=2)
    return update(engine, share(qwen_batch("uneven"), SPLITS[world]["uneven"], rank), RESUME)


def load(rank: int, world: int) -> Any:
    """Go on from what two ranks saved, on another number of ranks."""
    engine = resumable()
    if not (OUT / "saved_by_2").exists():
        return None
    assert engine.load_checkpoint(OUT / "saved_by_2") == 2
    return update(engine, share(qwen_batch("uneven"), SPLITS[world]["uneven"], rank), RESUME)


RESUME = DiffusionLossConfig(clip_ratio=9.0)


def resumable(**options: Any) -> Any:
    states = {"policy_state_adapters": ["default", "old"], "lora_rank": 3, **FEW}
    return HELP.build_engine(QWEN, model=states, engine={"ema_decay": 0.5, **options}, optim={"lr": 1e-4})


def one_sharded(rank: int, world: int) -> Any:
    """Sharding for its own sake: a group of one that the engine starts, parameters offloaded by FSDP2."""
    return lora(rank, world, "even", engine={"sharding": "shard", "offload_policy": True})


def failing(rank: int, world: int) -> Any:
    """Rank 1's loss fails in the second micro-batch; the others must learn it, from it, in time."""
    engine = HELP.build_engine(QWEN, model=FEW)
    calls = [0]

    def loss(model_output: Any, data: Any, dp_group: Any) -> Any:
        calls[0] += 1
        if rank == 1 and calls[0] == 2:
            raise ZeroDivisionError("the reward of sample 3 was empty")
        return DiffusionLoss("flow_grpo")(model_output, data, dp_group)

    start = time.monotonic()
    try:
        engine.forward_backward(share(qwen_batch("even"), SPLITS[world]["even"], rank), loss)
        engine.optimizer_step()
    except Exception as error:
        return {"error": type(error).__name__, "text": str(error), "seconds": time.monotonic() - start}
    return {"error": None, "text": "", "seconds": 0.0}


def aborting(rank: int, world: int) -> dict[str, Any]:
    """What a rank does whose collectives do not break by themselves (NCCL's): here the wait is played."""
    released, aborts = threading.Event(), []
    kept = vars(failures).copy()
    failures._waits_forever = lambda: True
    failures._abort_groups = lambda: (aborts.append(1), released.set())
    failures.GRACE_S = 1.0

    def outcome(body: Callable[[], Any]) -> dict[str, Any]:
        released.clear()
        aborts.clear()
        start = time.monotonic()
        name, text = "none", ""
        try:
            with failures.shared_failure("a call"):
                body()
        except Exception as error:
            name, text = type(error).__name__, str(error)
        return {"error": name, "text": text, "seconds": time.monotonic() - start, "aborts": len(aborts)}

    def wait() -> None:
        if not released.wait(30.0):
            raise RuntimeError("nobody ended the wait")

    def fail() -> None:
        raise ZeroDivisionError("the reward of sample 3 was empty")

    found = {"all raise": outcome(fail)}
    dist.barrier()  # the group is whole
    found["one raises"] = outcome(wait if rank == 0 else fail)
    dist.barrier()
    # Rank 0 came through that call, and waits for rank 1 in the next.
    found["one raised before"] = outcome((lambda: None) if rank == 0 else fail)
    found["one raised before"] = outcome(wait) if rank == 0 else found["one raised before"]
    vars(failures).update(kept)
    failures._calls = itertools.count(1000)  # rank 0 made one call more
    return found


Scenario = Callable[[int, int], Any]
PLAN: list[tuple[int, list[Scenario]]] = [
    (
        1,
        [
            lora_even,
            lora_uneven,
            full,
            forward_process,
            preference,
            experts,
            experts_apart,
            sequence,
            sequence_whole,
            save,
        ],
    ),
    (
        2,
        [
            lora_even,
            lora_uneven,
            whole_copies,
            whole_copies_full,
            whole_copies_save,
            full,
            forward_process,
            experts,
            experts_apart,
            sequence,
            sequence_whole,
            mixed,
            preference,
            save,
            load,
            aborting,
            failing,
        ],
    ),
    (4, [lora_uneven, load]),
    (1, [load, one_sharded, mixed]),
]


def on_cpu(found: Any) -> Any:
    if isinstance(found, dict):
        return {key: on_cpu(value) for key, value in found.items()}
    return found.cpu() if isinstance(found, torch.Tensor) else found


def join(rank: int, world: int, meeting: Path, timeout_s: float) -> None:
    store = dist.FileStore(str(meeting), world)
    backend = "cpu:gloo,cuda:nccl" if CUDA else "gloo"
    limit = datetime.timedelta(seconds=timeout_s)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=limit)


def rank_main(rank: int, world: int, meeting: Path, scenarios: list[Scenario]) -> None:
    torch.set_num_threads(1)
    if CUDA:
        if torch.cuda.device_count() < world:
            return
        os.environ["LOCAL_RANK"] = str(rank)
        torch.cuda.set_device(rank)
        torch.backends.cudnn.allow_tf32 = False
        scenarios = [scenario for scenario in scenarios if scenario is not aborting]  # which plays that GPU's part
    if world > 1:
        join(rank, world, meeting, 60.0)
    for scenario in scenarios:
        if scenario is failing:
            # Here the deadline is the subject; elsewhere a busy machine must not end the test.
            dist.destroy_process_group()
            join(rank, world, meeting.with_name(f"{meeting.name}_failing"), 8.0)
        start = time.process_time()
        result = on_cpu(scenario(rank, world))
        print(f"{scenario.__name__} {world} {rank} {time.process_time() - start:.2f} s", file=sys.stderr)
        torch.save(result, OUT / f"{scenario.__name__}_{world}_{rank}.pt")


def fork(rank: int, world: int, meeting: Path, scenarios: list[Scenario]) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 0
    try:
        rank_main(rank, world, meeting, scenarios)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def run(number: int) -> None:
    world, scenarios = PLAN[number]
    children = []
    for rank in range(world):
        if CUDA:
            again = [sys.executable, *sys.argv[:4], str(number), str(rank)]
            children.append(os.spawnv(os.P_NOWAIT, sys.executable, again))
        else:
            children.append(fork(rank, world, OUT / f"meeting{number}", scenarios))
    limit = time.monotonic() + DEADLINE_S
    waiting = set(children)
    while waiting and time.monotonic() < limit:
        for pid in list(waiting):
            if os.waitpid(pid, os.WNOHANG)[0]:
                waiting.discard(pid)
        time.sleep(0.05)
    for pid in waiting:
        print(f"rank process {pid} of {world} did not end in {DEADLINE_S} s", file=sys.stderr)
        os.kill(pid, 9)
        os.waitpid(pid, 0)


if __name__ == "__main__":
    if len(sys.argv) > 4:
        group, place = int(sys.argv[4]), int(sys.argv[5])
        rank_main(place, PLAN[group][0], OUT / f"meeting{group}", PLAN[group][1])
    else:
        for group in range(len(PLAN)):
            run(group)
