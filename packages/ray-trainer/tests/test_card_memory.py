"""What the sums say is what the engine builds and what cards were seen to hold; and where the parts of a run go for it."""

import functools
import json
import math
from dataclasses import replace

import pytest
from accelerate import init_empty_weights
from model_specs import available, get_spec_for, tiny
from ray_trainer.card_memory import GB, check_split, measure
from ray_trainer.compose import compose
from ray_trainer.errors import TrainerError
from ray_trainer.model_folder import part_shapes
from ray_trainer.placement import Machine, borrows, foresee, place, sleeps

FULL = ["model.lora_rank=64", "actor.fsdp_config.model_dtype=bf16", "rollout.dtype=bfloat16", "trainer.num_workers=8",
        "actor.ppo_micro_batch_size_per_gpu=8", "model.enable_gradient_checkpointing=true", "rollout.pipeline.height=512",
        "rollout.pipeline.width=512", "rollout.pipeline.true_cfg_scale=1.0"]  # fmt: skip
ENGINES = ["rollout.backend=vllm_omni", "rollout.vllm_omni.max_num_seqs=16"]
NODE = Machine(8, 8)


def make(*keys):
    from flowgrpo.cli import APP

    return compose("flowgrpo", APP.recipes / "tiny_flow_grpo.yaml", list(keys))


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """`built("flux")` is the folder of that tiny pipeline."""
    return functools.cache(lambda name: tiny.build(name, tmp_path_factory.mktemp(name)))


@pytest.mark.parametrize("target", ["all-linear", "attention", "[to_q,to_v]", r".*\.0\..*to_k"])
@pytest.mark.parametrize("name", [*available(), "sd35", "wan_5b"])
def test_parameters_and_adapters_are_those_of_the_engine(name, target, built):
    from fsdp_diffusers_engine import adapters

    folder = built(name)
    config = make("model.lora_rank=3", f"model.target_modules={target}", "model.policy_state_adapters=[default,old]")
    spec = get_spec_for(folder)
    with init_empty_weights():
        module = spec.empty_transformer(folder, None)
    needs = measure(folder, config, 10)
    assert needs.base == 4 * sum(p.numel() for p in module.state_dict().values())
    adapters.inject_adapters(module, config.model, spec, ["default"])
    lora = sum(p.numel() for n, p in module.named_parameters() if ".lora_" in n)
    assert lora > 0
    assert needs.trained == 4 * lora * (4 + 1)
    assert needs.heads == spec.transformer_config.get("num_attention_heads", spec.transformer_config.get("n_heads"))


def sparse(file, shapes):
    """A safetensors file of bf16 tensors that takes no disk."""
    header, end = {}, 0
    for name, shape in shapes.items():
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [end, end + 2 * math.prod(shape)]}
        end += 2 * math.prod(shape)
    text = json.dumps(header).encode()
    with file.open("wb") as opened:
        opened.write(len(text).to_bytes(8, "little") + text)
        opened.truncate(8 + len(text) + end)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    """Folder of a Qwen-Image of full size: its shapes, and a text encoder of 8.29 billion parameters."""
    from diffusers import QwenImageTransformer2DModel

    folder = tiny.build("qwen_image", tmp_path_factory.mktemp("qwen"))
    with init_empty_weights():
        module = QwenImageTransformer2DModel(num_layers=60)
    for part, file, shapes in (
        ("transformer", "diffusion_pytorch_model", {n: p.shape for n, p in module.named_parameters()}),
        ("text_encoder", "model", {"all": (8_290, 1_000_000)}),
    ):
        for old in (folder / part).glob("*.safetensors"):
            old.unlink()
        sparse(folder / part / f"{file}.safetensors", shapes)
    module.save_config(folder / "transformer")
    return folder


def test_the_sums_are_what_a_card_was_seen_to_hold(qwen):
    # Measured on H100s (MEASURED.md of fsdp-diffusers-engine): an update of 8 samples with 128 text tokens, no guidance, all blocks
    # recomputed, peaks at 51.1 GB in one process, and at 29.8 GB in each of two that share the weights.
    needs = measure(qwen, make(*FULL), 128)
    assert needs.base / GB == pytest.approx(40.86, rel=0.01)
    assert needs.trained / 16 / 1e6 == pytest.approx(425, rel=0.01)
    whole = needs.base + needs.trained + needs.update
    half = (needs.base + needs.trained) / 2 + 2 * needs.base / needs.blocks + needs.update
    assert 51.1 * 0.99 <= whole / GB <= 51.1 * 1.05
    assert 29.8 * 0.99 <= half / GB <= 29.8 * 1.07


def chosen(qwen, card_gb, machines, *keys):
    config = make(*FULL, *keys)
    return place(config, machines, measure(qwen, config, 128), card_gb * GB)


def test_whole_copies_where_they_fit_and_else_one_for_each_machine(qwen):
    assert chosen(qwen, 141, [NODE]).sharding == "replicate"
    assert chosen(qwen, 85, [NODE]).sharding == "replicate"
    small = chosen(qwen, 60, [NODE, NODE], "trainer.num_workers=16")
    assert (small.sharding, small.fsdp_size) == ("shard", 8)
    assert chosen(qwen, 60, [NODE, Machine(4, 4)], "trainer.num_workers=12").fsdp_size == 4
    wide = chosen(qwen, 60, [NODE, NODE], "trainer.num_workers=16", "actor.fsdp_config.fsdp_size=16")
    assert (wide.sharding, wide.fsdp_size) == ("shard", 16)
    assert chosen(qwen, 60, [NODE], "actor.fsdp_config.sharding=replicate").sharding == "replicate"
    assert any("GB are needed" in line for line in chosen(qwen, 30, [NODE]).lines)
    assert not any("GB are needed" in line for line in small.lines)
    with pytest.raises(TrainerError, match="no machine has two of the 2"):
        chosen(qwen, 60, [Machine(1, 1)] * 2, "trainer.num_workers=2", "actor.fsdp_config.sharding=shard")


def test_engines_follow_the_gpus(qwen):
    beside = chosen(qwen, 85, [NODE], *ENGINES)  # two whole copies do not fit 85 GB, one beside a shard does
    assert (beside.sharding, beside.engines, beside.tensor_parallel, beside.beside) == ("shard", 8, 1, True)
    roomy = chosen(qwen, 141, [NODE], *ENGINES)
    assert (roomy.sharding, roomy.engines, roomy.tensor_parallel) == ("replicate", 8, 1)
    assert not sleeps(make(*FULL, *ENGINES), roomy)  # one copy serves both
    for choice, copies, away in (("false", True, False), ("true", False, True)):
        config = make(*FULL, *ENGINES, f"rollout.vllm_omni.enable_sleep_mode={choice}")
        assert (borrows(config, roomy), sleeps(config, roomy)) == (copies, away)
    assert sleeps(make(*FULL, *ENGINES), beside)  # a shard is no whole copy
    assert not borrows(make(*FULL, *ENGINES, "rollout.fp8=true"), roomy)
    assert not sleeps(make(*FULL, *ENGINES), replace(roomy, beside=False))
    own = chosen(qwen, 85, [NODE, Machine(8, 0)], *ENGINES)
    assert (own.sharding, own.engines, own.tensor_parallel, own.beside) == ("replicate", 8, 1, False)
    split = chosen(qwen, 48, [NODE, Machine(8, 0)], *ENGINES)  # an engine of 58 GB goes over two cards
    assert (split.sharding, split.engines, split.tensor_parallel) == ("shard", 4, 2)
    uneven = chosen(qwen, 85, [NODE, Machine(3, 0)], *ENGINES)
    assert (uneven.engines, uneven.beside) == (3, False)


def test_gpus_without_work_are_said(qwen):
    assert any(
        "8 of 16 GPUs have no work; raise trainer.num_workers" in line
        for line in chosen(qwen, 85, [Machine(16, 8)]).lines
    )
    two = chosen(qwen, 85, [NODE, Machine(8, 0)], *ENGINES, "rollout.num_replicas=2")
    assert any("6 of 16 GPUs have no work" in line for line in two.lines)
    assert not any("no work" in line for line in chosen(qwen, 85, [NODE, Machine(8, 0)], *ENGINES).lines)


def test_replicas_that_find_no_gpu_are_refused(qwen):
    with pytest.raises(TrainerError, match="rollout.num_replicas=9 of 1 GPUs each find neither 9 free GPUs beside"):
        chosen(qwen, 85, [NODE], *ENGINES, "rollout.num_replicas=9")


def test_a_dry_run_prints_the_sums(qwen):
    lines = foresee(make(*FULL, f"model.path={qwen}", "ray.address=auto"))
    assert lines[0] == "placement: 8 training processes, a whole copy each (sharding=replicate); they sample themselves"
    assert "8 GPUs of 85 GB" in lines[1]
    assert len({len(line) for line in lines[2:-1]}) == 1  # aligned
    assert "replicate   shard over 8" in lines[2]
    small = foresee(make(*FULL, f"model.path={qwen}", "ray.gpu_memory_gb=48"))
    assert "one copy for each 8 (sharding=shard)" in small[0]


def test_tokens_and_heads_are_shared_evenly_or_refused(qwen):
    three = make(*FULL, "actor.fsdp_config.ulysses_sequence_parallel_size=3")
    with pytest.raises(TrainerError, match=r"size=3 does not divide the 1024 tokens of 512x512 pixels"):
        check_split(three, qwen, 16)
    with pytest.raises(TrainerError, match=r"tensor_model_parallel_size=5 does not divide the 24 attention heads"):
        check_split(make(*FULL, "rollout.vllm_omni.tensor_model_parallel_size=5"), qwen, 16)
    four = make(
        *FULL, "actor.fsdp_config.ulysses_sequence_parallel_size=4", "rollout.vllm_omni.tensor_model_parallel_size=8"
    )
    check_split(four, qwen, 16)
    assert measure(qwen, four, 128).update == measure(qwen, make(*FULL), 128).update / 4


def test_all_weights_count_gradient_moments_and_copies(qwen):
    keys = ["model.lora_rank=0", "model.policy_state_adapters=[default,reference]", "actor.fsdp_config.model_dtype=fp32",
            "actor.fsdp_config.mixed_precision.param_dtype=bf16", "actor.fsdp_config.ema_decay=0.9"]  # fmt: skip
    needs = measure(qwen, make(*FULL, *keys), 128)
    assert needs.base / GB == pytest.approx(81.7, rel=0.01)  # fp32
    assert (needs.trained, needs.moments, needs.states) == (3 * needs.base, 2 * needs.base, 2 * needs.base)
    eight = chosen(qwen, 85, [NODE], *keys)  # whole copies are not considered: each would send all gradients
    assert (eight.sharding, eight.fsdp_size, eight.state_offload, eight.optimizer_offload) == ("shard", 8, True, False)
    assert any("policy states on the CPU" in line for line in eight.lines)
    assert not any("GB are needed" in line for line in eight.lines)
    roomy = chosen(qwen, 141, [NODE], *keys)
    assert (roomy.sharding, roomy.state_offload) == ("shard", False)
    assert any("copies of it (policy states)" in line for line in roomy.lines)
    by_hand = chosen(qwen, 141, [NODE], *keys, "actor.fsdp_config.state_offload=true")
    assert by_hand.state_offload
    merged = measure(qwen, make(*FULL, "model.lora.merge=true"), 128)
    assert 0.6 < merged.merged / merged.base < 0.7  # the modulations of its norms have no adapter
    with pytest.raises(TrainerError, match="rollout.sync=nccl joins one card of a trainer with one of each replica"):
        chosen(qwen, 141, [NODE], *ENGINES, "model.lora.merge=true", "rollout.sync=nccl")


def test_a_tiny_model_on_a_cpu_is_one_line():
    assert foresee(make()) == [
        "placement: 1 training process, a whole copy (sharding=replicate); they sample themselves"
    ]


def test_part_shapes_reads_any_part(qwen):
    assert part_shapes(qwen, "text_encoder") == {"all": (8_290, 1_000_000)}
