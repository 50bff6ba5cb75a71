"""LoRA adapters of an engine: which modules they wrap, and how they start.

The adapters are put in before the module is sharded, so that PEFT sees whole shapes; their first values are drawn from
(seed, tensor name) and do not depend on the number of ranks or on the order of construction.
"""

from __future__ import annotations

import hashlib
import math
import re
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, get_args

import torch
from lora_sync.layers import adapter_parameters
from torch import Tensor, nn

from .config import DiffusionModelConfig, LoRAInit
from .errors import EngineError
from .targets import resolve_targets

if TYPE_CHECKING:
    from model_specs import ModelSpec

TRAINED = "default"
"""The adapter that the optimizer sees."""
REFERENCE = "reference"
"""Logical policy state: adapters off."""
EMA = "ema"
"""Policy state that averages the trained one."""

_LORA_INITS = get_args(LoRAInit)


def inject_adapters(module: nn.Module, config: DiffusionModelConfig, spec: ModelSpec, names: Sequence[str]) -> None:
    """Put a LoRA for each of `names` into `module`; `default` ends active, and alone trainable."""
    from peft import LoraConfig

    if config.lora_init_weights not in _LORA_INITS:
        raise EngineError(
            f"lora_init_weights={config.lora_init_weights!r} is not one of {_LORA_INITS}; choose one of them"
        )
    exclude = config.exclude_modules
    linear = [name for name, child in module.named_modules() if isinstance(child, nn.Linear)]
    targets = resolve_targets(linear, config, spec)  # before the first adapter hides the names
    on_meta = any(p.device.type == "meta" for p in module.parameters())
    for name in names:
        lora = LoraConfig(
            r=config.lora_rank,
            lora_alpha=config.lora_alpha,
            init_lora_weights="gaussian" if config.lora_init_weights == "gaussian" else True,
            target_modules=targets,
            exclude_modules=exclude if exclude is None or isinstance(exclude, str) else list(exclude),
        )
        with warnings.catch_warnings(), _no_storage() if on_meta else nullcontext():
            # Several adapters are the point here.
            warnings.filterwarnings("ignore", message="Already found a `peft_config` attribute")
            module.add_adapter(lora, adapter_name=name)  # type: ignore[operator]
    module.set_adapter(TRAINED)  # type: ignore[operator]
    mark_trainable(module)


def _no_storage() -> AbstractContextManager[None]:
    """Parameters made inside go to the meta device. PEFT by itself sends only the first adapter of a meta layer there:
    later ones would keep storage on the CPU, with numbers that each process draws for itself."""
    from accelerate import init_empty_weights

    return init_empty_weights(include_buffers=False)  # type: ignore[no-any-return]


def mark_trainable(module: nn.Module) -> None:
    """Gradients for the trained adapter only, whatever PEFT left switched on."""
    module.requires_grad_(False)
    for parameter in adapter_parameters(module, TRAINED).values():
        parameter.requires_grad_(True)


def draw_initial(name: str, shape: Sequence[int], config: DiffusionModelConfig) -> Tensor:
    """The first value of an adapter tensor, fp32 on the CPU, from (`lora_seed`, its name without the adapter's).

    `gaussian` draws A with standard deviation 1/rank, `kaiming` uniformly with bound 1/sqrt(fan in), as PEFT does.
    """
    if ".lora_B." in name:
        return torch.zeros(*shape)
    plain = re.sub(r"(\.lora_A)\.[^.]+\.", r"\1.", name)
    digest = hashlib.blake2b(f"{config.lora_seed}:{plain}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)
    if config.lora_init_weights == "gaussian":
        return torch.randn(*shape, generator=generator) / config.lora_rank
    bound = 1.0 / math.sqrt(shape[1])
    return torch.rand(*shape, generator=generator) * (2 * bound) - bound
