"""Models made of two transformers, such as Wan2.2's high- and low-noise experts, trained as one module.

Their layer names start with `transformer.` or `transformer_2.`. Other tools keep one LoRA per expert, so an adapter is
split on its way out and joined on its way in.
"""

from __future__ import annotations

from collections.abc import Mapping

from .payload import LoRAPayload

EXPERTS = ("transformer", "transformer_2")


def expert_of(module: str) -> tuple[str, str]:
    """(expert, layer name inside it); ("", name) for models of one transformer."""
    head, _, rest = module.partition(".")
    return (head, rest) if head in EXPERTS else ("", module)


def split_experts(payload: LoRAPayload) -> dict[str, LoRAPayload]:
    """One payload per expert, without prefix and fingerprint (which is of both); `{"": payload}` for one transformer."""
    groups: dict[str, list[str]] = {}
    for module in payload.modules:
        groups.setdefault(expert_of(module)[0], []).append(module)
    if set(groups) == {""}:
        return {"": payload}
    parts = {}
    for expert, modules in groups.items():
        prefix = f"{expert}." if expert else ""
        full_names = set(payload.target_modules) >= set(payload.modules)
        parts[expert] = LoRAPayload.build(
            {
                f"{module.removeprefix(prefix)}{key.removeprefix(module)}": payload.tensors[key]
                for module in modules
                for key in (f"{module}.lora_A.weight", f"{module}.lora_B.weight")
            },
            alphas={module.removeprefix(prefix): payload.alpha_of(module) for module in modules},
            version=payload.version,
            target_modules=None if full_names else payload.target_modules,
        )
    return parts


def join_experts(parts: Mapping[str, LoRAPayload]) -> LoRAPayload:
    """Inverse of `split_experts`."""
    if set(parts) == {""}:
        return parts[""]
    first = next(iter(parts.values()))
    named = {(f"{expert}." if expert else ""): part for expert, part in parts.items()}
    return LoRAPayload.build(
        {prefix + key: tensor for prefix, part in named.items() for key, tensor in part.tensors.items()},
        alphas={prefix + module: part.alpha_of(module) for prefix, part in named.items() for module in part.modules},
        version=first.version,
    )
