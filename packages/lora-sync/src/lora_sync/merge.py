"""Add an adapter to the frozen weights and take it out again.

In floating point (W + D) − D is not W. `merge` therefore keeps the original of every float32 layer it changes, and
`unmerge` puts that back: bitwise. For bfloat16 the copy would cost as much as the model, so it is optional; without it the
error of the round trip is measured while merging and reported beside its bound. A trainer that merges at every step
should not merge in place at all: `merged_weights` gives the sums one at a time and leaves the model alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .errors import AdapterError, BindError, PayloadError
from .layers import check_plain_lora, full, layers_of, local, local_slices, reshard

_STATE = "_lora_sync_merged"


@dataclass(frozen=True)
class MergeReport:
    """What a merge did, largest over all layers.

    Args:
        adapter: its name.
        modules: layers changed.
        rounding: largest |stored − (W + D)|: what the dtype cannot hold of the merged weight.
        undo_error: largest |W after merge and unmerge − W|; 0.0 where the originals are kept.
        undo_bound: what theory allows for it, u·(|W + D| + |W' − D|) with unit round-off u of the dtype.
        kept_bytes: memory of the originals.
    """

    adapter: str
    modules: int
    rounding: float
    undo_error: float
    undo_bound: float
    kept_bytes: int


def lora_delta(layer: Any, adapter_name: str, rows: slice | None = None, columns: slice | None = None) -> Tensor:
    """(alpha / r) · B·A in float32, as [out, in·…], or a window of it. A collective when the adapter is sharded."""
    down = full(layer.lora_A[adapter_name].weight).float().flatten(1)
    up = full(layer.lora_B[adapter_name].weight).float().flatten(1)
    if rows is not None:
        up = up[rows]
    if columns is not None:
        down = down[:, columns]
    return float(layer.scaling[adapter_name]) * (up @ down)


def merge(module: nn.Module, adapter_name: str = "default", *, exact: bool | None = None) -> MergeReport:
    """W ← W + (alpha / r) · B·A in every adapted layer, and run without the adapter from then on.

    Args:
        exact: keep the originals so that `unmerge` is bitwise. None: yes for float32 and float64 weights, no for others.

    Works on each rank's shard under FSDP2 (a collective). Raises ``BindError`` when something is merged already.
    """
    if _STATE in module.__dict__:
        raise BindError(f"adapter {module.__dict__[_STATE][0].adapter!r} is merged already; unmerge it first.")
    layers = layers_of(module, adapter_name)
    reshard(module)
    for name, layer in layers.items():
        _check(name, layer, adapter_name)
    rounding = undo_error = undo_bound = 0.0
    kept: dict[str, Tensor] = {}
    done: list[str] = []
    try:
        for name, layer in layers.items():
            weight, delta = _weight_and_delta(layer, adapter_name)
            keep = weight.dtype in (torch.float32, torch.float64) if exact is None else exact
            before = weight.clone()
            if keep:
                kept[name] = before
            done.append(name)
            # one precision above the weight's own, so that its rounding can be seen
            work = before.to(torch.float64 if weight.dtype in (torch.float32, torch.float64) else torch.float32)
            total = work + delta
            with torch.no_grad():
                weight.copy_(total)
            if weight.numel():
                rounding = max(rounding, float((weight.to(total.dtype) - total).abs().max()))
            if not keep and weight.numel():
                back = (weight.to(total.dtype) - delta).to(weight.dtype)
                undo_error = max(undo_error, float((back.to(total.dtype) - work).abs().max()))
                unit = torch.finfo(weight.dtype).eps / 2
                undo_bound = max(undo_bound, unit * float((total.abs() + (weight.to(total.dtype) - delta).abs()).max()))
            layer.merged_adapters.append(adapter_name)
    except BaseException:
        for name in done:
            _take_out(layers[name], adapter_name, kept.get(name))
        raise
    report = MergeReport(
        adapter_name,
        len(layers),
        rounding,
        undo_error,
        undo_bound,
        sum(t.numel() * t.element_size() for t in kept.values()),
    )
    module.__dict__[_STATE] = (report, kept)
    return report


def unmerge(module: nn.Module) -> MergeReport:
    """Undo `merge`: bitwise where the originals were kept, else W ← W − (alpha / r) · B·A. Returns the merge's report."""
    if _STATE not in module.__dict__:
        raise BindError("nothing is merged in this module.")
    report: MergeReport = module.__dict__[_STATE][0]
    kept: dict[str, Tensor] = module.__dict__[_STATE][1]
    reshard(module)
    for name, layer in layers_of(module, report.adapter).items():
        _take_out(layer, report.adapter, kept.get(name))
    del module.__dict__[_STATE]
    return report


def merged_weight(name: str, layer: Any, adapter_name: str) -> Tensor:
    """Full W + (alpha / r) · B·A of one layer, summed in float32 and rounded once to W's dtype. Collective when sharded."""
    _check(name, layer, adapter_name)
    weight = full(layer.get_base_layer().weight)
    return (weight.float() + lora_delta(layer, adapter_name).reshape(weight.shape)).to(weight.dtype)


def merged_weights(module: nn.Module, adapter_name: str = "default") -> Iterator[tuple[str, Tensor]]:
    """(neutral layer name + ``.weight``, full W + D in W's dtype), one layer at a time; the module stays as it is."""
    reshard(module)
    for name, layer in layers_of(module, adapter_name).items():
        yield f"{name}.weight", merged_weight(name, layer, adapter_name)


def _check(name: str, layer: Any, adapter_name: str) -> None:
    check_plain_lora(name, layer, adapter_name)
    if getattr(layer, "fan_in_fan_out", False):
        raise PayloadError(
            f"layer {name!r} keeps its weight transposed (fan_in_fan_out), which merging does not support."
        )
    if layer.merged:
        raise BindError(f"layer {name!r} has {layer.merged_adapters!r} merged by PEFT; call its unmerge first.")
    if not torch.is_floating_point(layer.get_base_layer().weight):
        raise AdapterError(f"layer {name!r} is quantised; merge into the unquantised model instead.")


def _take_out(layer: Any, adapter_name: str, original: Tensor | None) -> None:
    with torch.no_grad():
        if original is not None:
            local(layer.get_base_layer().weight).copy_(original)
        else:
            weight, delta = _weight_and_delta(layer, adapter_name)
            weight.copy_(weight.to(delta.dtype) - delta)
    if adapter_name in layer.merged_adapters:
        layer.merged_adapters.remove(adapter_name)


def _weight_and_delta(layer: Any, adapter_name: str) -> tuple[Tensor, Tensor]:
    """This rank's part of the weight (live memory) and of the change, in one shape."""
    parameter = layer.get_base_layer().weight
    weight = local(parameter)
    slices = local_slices(parameter)
    columns = slices[1] if parameter.ndim == 2 else None  # convolutions are never cut inside a filter
    delta = lora_delta(layer, adapter_name, slices[0], columns)
    return weight, delta.reshape(weight.shape).to(weight.device)
