"""Training through `velocity`: gradients, adapters, sharding, and Wan's two experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from model_specs import PromptEmbeds, SpecError, get_spec_for
from model_specs.common import compute_dtype
from torch import distributed as dist

NAMES = ["qwen_image", "sd35", "flux", "z_image", "wan", "wan_5b"]


def inputs(loaded: Any, batch: int = 2) -> tuple[torch.Tensor, torch.Tensor, Any, dict[str, Any]]:
    frames = 5 if loaded.spec.name == "wan" else 1
    size = {"height": 64, "width": 64, "num_frames": frames}
    x = torch.randn(batch, *loaded.spec.latent_shape(**size), generator=torch.Generator().manual_seed(3))
    sigma = torch.linspace(0.95, 0.9, batch)
    cond = loaded.encoder.encode(["two red circles"], 32)
    return x, sigma, cond, {**size, "guidance_scale": 3.5 if loaded.spec.name == "flux" else None}


@pytest.mark.parametrize("name", NAMES)
def test_lora_on_every_target_gets_gradients(load: Callable[[str], Any], name: str) -> None:
    peft = pytest.importorskip("peft")
    loaded = load(name)
    x, sigma, cond, options = inputs(loaded)
    with torch.no_grad():
        before = loaded.velocity(loaded.transformer, x, sigma, cond, **options)
    network = loaded.spec.load_transformer(loaded.folder).requires_grad_(False)
    network.add_adapter(
        peft.LoraConfig(r=2, lora_alpha=2, init_lora_weights="gaussian", target_modules=list(loaded.spec.lora_targets))
    )
    named = {key: p for key, p in network.named_parameters() if p.requires_grad}
    missing = [target for target in loaded.spec.lora_targets if not any(f"{target}.lora_" in key for key in named)]
    assert missing == []
    assert not any(key.startswith("proj_out") for key in named)  # the network's last layer is no target

    velocity = loaded.velocity(network, x, sigma, cond, **options)
    torch.testing.assert_close(velocity.detach(), before, rtol=0, atol=1e-6)  # B starts at zero
    velocity.square().mean().backward()
    unused = [key for key, p in named.items() if "lora_B" in key and (p.grad is None or not p.grad.abs().sum() > 0)]
    if name == "wan":  # sigma 0.95 and 0.9: all rows belong to the high-noise expert
        assert all(key.startswith("transformer_2.") for key in unused)
        unused = [key for key in unused if not key.startswith("transformer_2.")]
    # In the last joint block the text's own queries, output and MLP come too late to reach the picture.
    late = {"qwen_image": ("txt_mlp", "to_add_out", "add_q_proj"), "sd35": ("add_q_proj",)}.get(name, ())
    unused = [key for key in unused if not (key.startswith("transformer_blocks.1.") and any(x in key for x in late))]
    assert unused == []


def test_guided_velocity_has_the_gradient_of_the_rescaled_mixture(load: Callable[[str], Any]) -> None:
    """Against a numerical derivative: the rescaling by norms is part of the graph."""
    loaded = load("qwen_image")
    network = loaded.spec.load_transformer(loaded.folder).double().requires_grad_(False)
    x, sigma, cond, options = inputs(loaded, 1)
    cond, negative = cond.to(dtype=torch.float64), loaded.encoder.encode(["bad"], 32).to(dtype=torch.float64)
    weight = network.proj_out.weight
    direction = torch.randn(weight.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def loss() -> torch.Tensor:
        velocity = loaded.velocity(network, x, sigma, cond, negative=negative, true_cfg_scale=4.0, **options)
        return velocity.double().pow(3).sum()

    weight.requires_grad_(True)
    loss().backward()
    slope = (weight.grad * direction).sum()
    step = 1e-3
    with torch.no_grad():
        weight += step * direction
        above = loss()
        weight -= 2 * step * direction
        below = loss()
    torch.testing.assert_close(slope, (above - below) / (2 * step), rtol=1e-3, atol=0)


def test_untrained_output_layer_gives_no_nan(load: Callable[[str], Any]) -> None:
    loaded = load("qwen_image")
    network = loaded.spec.load_transformer(loaded.folder)
    torch.nn.init.zeros_(network.proj_out.weight)
    torch.nn.init.zeros_(network.proj_out.bias)
    x, sigma, cond, options = inputs(loaded)
    negative = loaded.encoder.encode(["bad"], 32)
    velocity = loaded.velocity(network, x, sigma, cond, negative=negative, true_cfg_scale=4.0, **options)
    velocity.sum().backward()
    assert torch.equal(velocity, torch.zeros_like(velocity))
    assert torch.isfinite(network.proj_out.weight.grad).all()


@pytest.mark.parametrize("name", NAMES)
def test_rows_do_not_depend_on_each_other(load: Callable[[str], Any], name: str) -> None:
    """A batch of mixed times and prompt lengths gives every row what it gets alone."""
    loaded = load(name)
    x, _, _, options = inputs(loaded, 3)
    sigma = torch.tensor([1.0, 0.5, 0.2])
    cond = loaded.encoder.encode(["a cat", "three red circles on a black background", "one green square"], 64)
    negative = loaded.encoder.encode(["bad"], 64)
    scale: dict[str, Any] = {"true_cfg_scale": 3.0}
    with torch.no_grad():
        together = loaded.velocity(loaded.transformer, x, sigma, cond, negative=negative, **scale, **options)
        for i in range(3):
            row = [i]
            own = PromptEmbeds(cond.embeds[row], cond.mask[row], None if cond.pooled is None else cond.pooled[row])
            alone = loaded.velocity(
                loaded.transformer, x[row], sigma[row], own.trim(), negative=negative, **scale, **options
            )
            torch.testing.assert_close(together[row], alone, rtol=0, atol=2e-5)


def test_wan_rows_reach_their_expert_and_train_it_only(load: Callable[[str], Any]) -> None:
    loaded = load("wan")
    network = loaded.spec.load_transformer(loaded.folder)
    x, _, cond, options = inputs(loaded, 3)
    sigma = torch.tensor([0.3, 0.875, 0.9])
    assert network.is_high(sigma * 1000).tolist() == [False, True, True]
    with torch.no_grad():
        mixed = loaded.velocity(network, x, sigma, cond, true_cfg_scale=(1.0, 1.0), **options)
        for i, expert in enumerate([network.transformer_2, network.transformer, network.transformer]):
            alone = loaded.velocity(expert, x[[i]], sigma[[i]], cond, **options)
            torch.testing.assert_close(mixed[[i]], alone, rtol=0, atol=1e-5)
    loaded.velocity(network, x[:1], sigma[:1], cond, **options).sum().backward()
    assert all(p.grad is None for p in network.transformer.parameters())
    assert any(p.grad is not None for p in network.transformer_2.parameters())
    with pytest.raises(SpecError, match="a pair is for a folder with two experts"):
        loaded.velocity(network.transformer, x, sigma, cond, true_cfg_scale=(1.0, 1.0), **options)


def test_wan_missing_expert(load: Callable[[str], Any], tmp_path: Path) -> None:
    import json
    import shutil

    folder = shutil.copytree(load("wan").folder, tmp_path / "wan")
    index = json.loads((folder / "model_index.json").read_text())
    index["transformer_2"] = [None, None]
    (folder / "model_index.json").write_text(json.dumps(index))
    with pytest.raises(SpecError, match=r"boundary_ratio=0\.875 but no transformer_2"):
        get_spec_for(folder).load_transformer(folder)


@pytest.fixture
def one_process_group() -> Iterator[None]:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_process_group")
@pytest.mark.parametrize("name", ["qwen_image", "z_image", "wan"])
def test_sharded_transformer_is_called_the_same(load: Callable[[str], Any], name: str) -> None:
    from torch.distributed.fsdp import fully_shard

    loaded = load(name)
    x, sigma, cond, options = inputs(loaded)
    network = loaded.spec.load_transformer(loaded.folder)
    for module in network.modules():
        if type(module).__name__ in (network._no_split_modules or ()):
            fully_shard(module)
    fully_shard(network)
    velocity = loaded.velocity(network, x, sigma, cond, **options)
    with torch.no_grad():
        expected = loaded.velocity(loaded.transformer, x, sigma, cond, **options)
    torch.testing.assert_close(velocity.detach(), expected, rtol=0, atol=1e-5)
    velocity.square().mean().backward()
    assert any(p.grad is not None for p in network.parameters())


@pytest.mark.usefixtures("one_process_group")
@pytest.mark.parametrize("name", NAMES)
def test_fp32_shards_that_compute_in_bf16(load: Callable[[str], Any], name: str) -> None:
    """The sharded network says that it computes in bf16, and does what a bf16 network does."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    loaded = load(name)
    x, sigma, cond, options = inputs(loaded)
    network = loaded.spec.load_transformer(loaded.folder).requires_grad_(False)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=False)
    for module in network.modules():
        if type(module).__name__ in (network._no_split_modules or ()):
            fully_shard(module, mp_policy=policy)
    fully_shard(network, mp_policy=policy)
    assert compute_dtype(network) == torch.bfloat16
    assert next(network.parameters()).dtype == torch.float32
    with torch.no_grad():
        velocity = loaded.velocity(network, x, sigma, cond, **options)
        expected = loaded.velocity(loaded.transformer, x, sigma, cond, **options)
    assert (velocity - expected).std() / expected.std() < 0.1


@pytest.mark.parametrize("name", NAMES)
def test_bf16_network_takes_fp32_latents(load: Callable[[str], Any], name: str) -> None:
    loaded = load(name)
    network = loaded.spec.load_transformer(loaded.folder, dtype=torch.bfloat16)
    x, sigma, cond, options = inputs(loaded)
    with torch.no_grad():
        velocity = loaded.velocity(network, x, sigma, cond, **options)
        expected = loaded.velocity(loaded.transformer, x, sigma, cond, **options)
    assert velocity.dtype == torch.float32
    assert (velocity - expected).std() / expected.std() < 0.1


@pytest.mark.parametrize("name", NAMES)
def test_empty_transformer_fills_from_its_folders(load: Callable[[str], Any], name: str) -> None:
    """Parameters on the meta device, tables real: after reading the files it is the loaded network."""
    from safetensors.torch import load_file

    loaded = load(name)
    network = loaded.spec.empty_transformer(loaded.folder)
    assert all(p.is_meta for p in network.parameters())
    assert not any(b.is_meta for b in network.buffers())
    state: dict[str, torch.Tensor] = {}
    for prefix, folder in loaded.spec.transformer_folders(loaded.folder).items():
        for file in folder.glob("*.safetensors"):
            state |= {prefix + key: value for key, value in load_file(file).items()}
    network.load_state_dict(state, assign=True)
    x, sigma, cond, options = inputs(loaded)
    with torch.no_grad():
        velocity = loaded.velocity(network, x, sigma, cond, **options)
        expected = loaded.velocity(loaded.transformer, x, sigma, cond, **options)
    torch.testing.assert_close(velocity, expected, rtol=0, atol=1e-5)
