"""LoRA adapters inside the engine's worker: one small product beside each linear layer, exactly as the trainer computes it.

An adapter could also be merged into the weights. In bf16 that loses it: a change below half a step of the weight's grid
(2⁻⁹ of the weight) rounds away, and after the first optimizer steps most changes are that small. So the product stays
apart, in the engine's dtype: `y += (x Aᵀ) Bᵀ`, one product for the A of all parts of a fused projection, and the B
products added in place. The layer keeps its weight under its own name; only its way to multiply (vLLM's `quant_method`)
is wrapped, so graphs stay whole under `torch.compile` and full-weight loads see the tree that they know.

Shapes: T tokens of all samples, R rank, P parts of a fused projection (q, k, v).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from vllm.distributed import get_tensor_model_parallel_world_size, tensor_model_parallel_all_reduce
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    QKVParallelLinear,
    RowParallelLinear,
)

from .lora_product import Factors, LoRAMethod
from .lora_request import OmniTensorLoRARequest, engine_tensors


class WorkerAdapters:
    """Takes the place of the engine's own LoRA manager, whose calls it answers.

    Args:
        pipeline: the engine's.
        packed: fused projection → its parts' names, e.g. `to_qkv` → `[to_q, to_k, to_v]`.
        device, dtype: where and in which dtype factors are kept.
    """

    def __init__(
        self, pipeline: Any, packed: Mapping[str, list[str]], device: torch.device, dtype: torch.dtype
    ) -> None:
        self.pipeline, self.device, self.dtype = pipeline, device, dtype
        self._fused = {part: (whole, number) for whole, parts in packed.items() for number, part in enumerate(parts)}
        self._parts = {whole: len(parts) for whole, parts in packed.items()}
        self._held: dict[int, dict[str, Factors]] = {}
        self._methods: dict[str, LoRAMethod] = {}
        self._active: int | None = None

    # ------------------------------------------------------------------------------- what the engine's worker calls

    def set_active_adapter(self, lora_request: Any | None, lora_scale: float = 1.0) -> None:
        """Sample with this adapter from now on; None: with the base."""
        number = None if lora_request is None else lora_request.lora_int_id
        if number is not None and number not in self._held:
            raise ValueError(f"adapter {number} was never bound here; there are {sorted(self._held)}")
        if lora_scale != 1.0:
            raise ValueError(f"lora_scale={lora_scale!r}: a module's scale is part of its B here, leave it at 1")
        if number != self._active:
            on = {} if number is None else self._held[number]
            for name, method in self._methods.items():
                method.active = on.get(name)
            self._active = number

    def add_adapter(self, lora_request: Any) -> bool:
        """The engine's own way in, from files, is not served: a file carries no version and gives no receipt."""
        raise ValueError(f"adapter {lora_request.lora_name!r}: send it with update_lora, which proves what is bound")

    def remove_adapter(self, adapter_id: int) -> bool:
        """Forget an adapter; False when it is not there."""
        if adapter_id == self._active:
            self.set_active_adapter(None)
        return self._held.pop(adapter_id, None) is not None

    def list_adapters(self) -> list[int]:
        """Numbers of those that are held."""
        return list(self._held)

    # ------------------------------------------------------------------------------------------------------ binding

    def bind(self, request: OmniTensorLoRARequest) -> dict[str, int]:
        """Keep an adapter under its new number, switch it on, and read it back.

        Returns modules and tensors bound, and how many elements read back equal to what was sent (all in a good sync).

        Raises:
            ValueError: the number is taken, or a module of the adapter finds no layer.
        """
        number = request.lora_int_id
        if number in self._held:
            raise ValueError(f"adapter id {number} exists already; every version needs an id of its own")
        sent = self._placed(request)
        layers = dict(self.pipeline.named_modules())
        self._held[number] = {name: self._factors(layers[name], parts) for name, parts in sent.items()}
        for name in sent:
            if name not in self._methods:
                layer = layers[name]
                layer.quant_method = self._methods[name] = LoRAMethod(layer.quant_method, _sizes(layer))
        self.set_active_adapter(request)
        modules = sum(len(parts) for parts in sent.values())
        return {"modules": modules, "tensors": 2 * modules, "equal": self._equal(layers, sent)}

    def _placed(self, request: OmniTensorLoRARequest) -> dict[str, dict[int, dict[str, Tensor]]]:
        """layer → part → {"A": [R, in], "B": [out, R]}, on the device."""
        placed: dict[str, dict[int, dict[str, Tensor]]] = defaultdict(lambda: defaultdict(dict))
        layers, lost = dict(self.pipeline.named_modules()), set()
        for key, tensor in engine_tensors(request, layers, self.device, self.dtype):
            name, _, side = key.rpartition(".lora_")
            prefix, _, last = name.rpartition(".")
            whole, part = self._fused.get(last, (last, 0))
            place = name if isinstance(layers.get(name), LinearBase) else f"{prefix}.{whole}"
            if not isinstance(layers.get(place), LinearBase):
                lost.add(name)
                continue
            placed[place][0 if place == name else part][side[0]] = tensor
        if lost:
            raise ValueError(f"no layer was found for {sorted(lost)[:3]} ({len(lost)} modules)")
        return placed

    def _factors(self, layer: Any, parts: Mapping[int, Mapping[str, Tensor]]) -> Factors:
        """This rank's factors of a layer; parts without an adapter are zero, lower ranks are filled up with zeros."""
        sizes, ranks = _sizes(layer), [part["A"].shape[0] for part in parts.values()]
        rank, wide = (
            max(ranks),
            getattr(layer, "input_size_per_partition", layer.input_size),
        )  # fp8 turns its weight round
        a = torch.zeros(len(sizes) * rank, wide, device=self.device, dtype=self.dtype)
        b = torch.zeros(sum(sizes), rank, device=self.device, dtype=self.dtype)
        for number, part in parts.items():
            for held, tensor in zip(_views(Factors(a, b), sizes, number, part), _own(layer, number, part), strict=True):
                if held.shape != tensor.shape:
                    raise ValueError(
                        f"a part of {type(layer).__name__} takes {list(held.shape)}, not {list(tensor.shape)}"
                    )
                held.copy_(tensor)
        return Factors(a, b)

    def _equal(self, layers: Mapping[str, Any], sent: Mapping[str, Mapping[int, Mapping[str, Tensor]]]) -> int:
        """Elements of the whole adapter that the layers multiply with as they were sent, over all ranks that share them.

        An element that several ranks hold counts once, and only where it is right on all of them.
        """
        equal = torch.zeros((), dtype=torch.int64, device=self.device)  # read once: every read waits for the device
        for name, parts in sent.items():
            method = layers[name].quant_method
            if method.active is None:
                raise ValueError(f"{name} did not take the adapter")
            for number, part in parts.items():
                views = _views(method.active, method.sizes, number, part)
                own = _own(layers[name], number, part)
                for held, tensor, whole in zip(views, own, (part["A"], part["B"]), strict=True):
                    equal += (held == tensor).sum() * (whole.numel() // tensor.numel())
        return int(tensor_model_parallel_all_reduce(equal)) // get_tensor_model_parallel_world_size()

    @property
    def modules(self) -> int:
        """Layers that were given an adapter at some time."""
        return len(self._methods)


def _sizes(layer: Any) -> list[int]:
    """Output columns of each part of a layer, on this rank."""
    sizes = getattr(layer, "output_partition_sizes", None) or [layer.weight.shape[0]]
    return [int(size) for size in sizes]


def _views(factors: Factors, sizes: list[int], number: int, part: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Where one part's A and B lie in a layer's factors."""
    rank, own = factors.b.shape[1], part["A"].shape[0]
    start = sum(sizes[:number])
    return factors.a[number * rank : number * rank + own], factors.b[start : start + sizes[number], :own]


def _own(layer: Any, number: int, part: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """This rank's share of one part's whole A and B: columns of A where rows of the weight are split, else rows of B."""
    a, b = part["A"], part["B"]
    size, rank = getattr(layer, "tp_size", 1), getattr(layer, "tp_rank", 0)
    if size > 1 and isinstance(layer, RowParallelLinear):
        return a.chunk(size, dim=1)[rank], b
    if size > 1 and isinstance(layer, ColumnParallelLinear):
        copies = layer.num_kv_head_replicas if isinstance(layer, QKVParallelLinear) and number else 1
        return a, b.chunk(size // copies)[rank // copies]
    return a, b
