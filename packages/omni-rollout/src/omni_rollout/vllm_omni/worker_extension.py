"""What the engine's worker can do for a trainer: bind LoRA tensors, replace all weights, and prove both.

The server calls these methods by `collective_rpc`; each returns plain values. An exception in here would reach the caller
as `{"supported": False, …}`, which `rpc.checked` turns back into an error.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from lora_sync.checksum import added_sums, value_sum
from lora_sync.layers import base_name
from lora_sync.one_copy import Layout, Loan
from torch import Tensor, nn
from vllm.distributed import get_tensor_model_parallel_rank, get_tp_group
from vllm.model_executor.layers.linear import ColumnParallelLinear, RowParallelLinear
from vllm_omni.diffusion.worker.diffusion_worker import CustomPipelineWorkerExtension
from vllm_omni.platforms import current_omni_platform

from .host_copy import HostCopy
from .lora_request import OmniTensorLoRARequest, checked_config, engine_name
from .shared import read_bucket
from .worker_adapters import WorkerAdapters


class vLLMOmniColocateWorkerExtension(CustomPipelineWorkerExtension):
    """Mixed into the engine's worker class by `worker_extension_cls`."""

    model_runner: Any
    lora_manager: Any
    _parts: dict[str, Tensor]
    _sent_sums: list[str]
    _borrowed = False
    _lent: dict[str, dict[str, Tensor]]
    _host_copy: HostCopy | None = None

    # ------------------------------------------------------------------------------------------------------- LoRA

    def bind_lora(self, request: OmniTensorLoRARequest, version: int) -> dict[str, Any]:
        """Bind an adapter under its new id, switch it on, and read it back; see `WorkerAdapters.bind`."""
        if request.lent is not None:
            request.lora_tensors = self._lent[request.lent]
        facts = self._adapters().bind(request)
        self.model_runner.pipeline.policy_version = version
        return facts

    def drop_lora(self, lora_int_id: int) -> bool:
        """Remove an adapter; False when it is not there."""
        return self._adapters().remove_adapter(lora_int_id)

    def _adapters(self) -> WorkerAdapters:
        """This worker's adapters. The first call puts them where the engine keeps its own manager."""
        manager = self.lora_manager
        if not isinstance(manager, WorkerAdapters):
            pipeline = self.model_runner.pipeline
            manager = WorkerAdapters(pipeline, manager._packed_modules_mapping, manager.device, manager.dtype)
            self.lora_manager = manager
        return manager

    # ---------------------------------------------------------------------------------------------------- weights

    def update_weights_from_ipc(
        self,
        peft_config: dict[str, Any] | None = None,
        base_sync_done: bool = False,
        use_shm: bool = False,
        *,
        bucket: Any,
        first: bool = True,
        last: bool = True,
        version: int = 0,
        lora_int_id: int = 0,
        lora_names: str = "any",
    ) -> dict[str, Any]:
        """Take one bucket of tensors.

        Args:
            peft_config: `r` and `lora_alpha`, whatever else makes no difference to the adapter (`checked_config`). Given, the
                tensors are an adapter's, accumulated over the buckets and bound at once after the last
                (no half-loaded adapter ever samples). None: they are transformer weights, written as they come, so that
                memory stays bounded.
            base_sync_done: an adapter needs a base to sit on: False with a `peft_config` is refused.
            use_shm: `bucket` is the name of a shared memory block, else a list of (name, tensor).
            first, last: ends of the stream. `version`: of the policy once the last bucket is in.
            lora_names: as in `OmniTensorLoRARequest`.

        Returns:
            For the last bucket of weights: `elements`, `unwritten` (elements that no tensor reached), `held` and `sent`
            (content sums; equal when every value arrived). Of an adapter: what `bind_lora` returns.
        """
        named = read_bucket(bucket) if use_shm else bucket
        if first:
            self._parts, self._sent_sums = {}, []
        if peft_config is not None:
            if not base_sync_done:
                raise ValueError("an adapter was sent before the base weights: sync the base first")
            self._parts |= dict(named)
            if not last:
                return {}
            request = OmniTensorLoRARequest(
                lora_name=f"v{version}", lora_int_id=lora_int_id, lora_path="/in-memory/stream",
                peft_config=checked_config(peft_config),
                lora_tensors={engine_name(name): tensor for name, tensor in self._parts.items()}, lora_names=lora_names,
            )  # fmt: skip
            self._parts = {}
            return self.bind_lora(request, version)
        return self._take_weights(named, first, last, version)

    @torch.no_grad()
    def _take_weights(self, named: list[tuple[str, Tensor]], first: bool, last: bool, version: int) -> dict[str, Any]:
        if self._borrowed:
            raise ValueError("these weights are the trainer's own: they cannot be replaced here")
        pipeline = self.model_runner.pipeline
        held = self._base_parameters()
        if first:
            if self._host_copy is not None:
                self._host_copy.forget()
            for parameter in held:
                parameter.fill_(float("nan"))  # what is still NaN after the last bucket was not sent
        pipeline.load_weights((engine_name(base_name(name)), value) for name, value in named)
        dtypes = {parameter.dtype for parameter in held}
        if len(dtypes) == 1:
            dtype = next(iter(dtypes))
            self._sent_sums.append(value_sum(value.to(dtype) for _, value in named))
        if not last:
            return {}
        pipeline.policy_version = version
        own = list(self._own_parameters())
        facts = {
            "elements": sum(parameter.numel() for parameter in own),
            "unwritten": sum(int(parameter.isnan().sum()) for parameter in own),
        }
        ranks = _from_all_ranks(facts)
        return {
            **{key: sum(rank[key] for rank in ranks) for key in facts},
            "held": self.weights_sum(),
            "sent": added_sums(self._sent_sums) if len(dtypes) == 1 else None,
        }

    def weights_sum(self) -> str:
        """`value_sum` of the transformer's base weights, over all ranks that share its layers."""
        return added_sums(_from_all_ranks(value_sum(self._own_parameters())))

    def _base_parameters(self) -> list[nn.Parameter]:
        """Parameters of the transformer, or of both experts, without adapters, as this rank holds them."""
        return [parameter for _, _, parameter in self._named_parameters()]

    def _own_parameters(self) -> Iterator[nn.Parameter]:
        """Those that this rank answers for: its parts of split layers, and on the first rank what every rank holds."""
        first = get_tensor_model_parallel_rank() == 0
        for module, name, parameter in self._named_parameters():
            columns, rows = isinstance(module, ColumnParallelLinear), isinstance(module, RowParallelLinear)
            split = columns or (rows and name == "weight")  # rows are added up before their bias comes in
            if first or (split and module.tp_size > 1):
                yield parameter

    def _named_parameters(self) -> Iterator[tuple[Any, str, nn.Parameter]]:
        """(module, its own parameter's name, parameter)."""
        pipeline = self.model_runner.pipeline
        for component in ("transformer", "transformer_2"):
            whole = getattr(pipeline, component, None)
            for module in whole.modules() if whole is not None else ():
                for name, parameter in module.named_parameters(recurse=False):
                    yield module, name, parameter

    # -------------------------------------------------------------------------------------- weights of a trainer

    def base_layout(self) -> dict[str, Layout]:
        """How the base weights lie here, by name below the pipeline."""
        return {name: Layout(parameter.dtype, tuple(parameter.shape)) for name, parameter in self._named_base()}

    @torch.no_grad()
    def borrow_base(
        self, loans: Mapping[str, Loan], adapters: Mapping[str, Mapping[str, Loan]] | None = None
    ) -> tuple[int, int]:
        """Use a trainer's weights in the place of those that equal them here, which are given back to the device; and open its
        adapters, by name, for `bind_lora`.

        Returns:
            Bytes that are shared now, and bytes of all base weights.
        """
        shared = whole = 0
        for name, parameter in self._named_base():
            whole += parameter.nbytes
            if name in loans and torch.equal(lent := loans[name].open(), parameter):
                parameter.data = lent
                shared += lent.nbytes
        self._lent = {
            adapter: {engine_name(name): loan.open() for name, loan in lent.items()}
            for adapter, lent in (adapters or {}).items()
        }
        self._borrowed = shared > 0
        gc.collect()
        self.release_memory()
        return shared, whole

    # ---------------------------------------------------------------------------------------------------- memory

    def keep_host_copy(self) -> None:
        """Copy the weights to the host in the background, for a sleep that only has to free them; nothing on a CPU."""
        if not torch.cuda.is_available():
            return
        from vllm.device_allocator import cumem

        allocator = cumem.CuMemAllocator.get_instance()
        self._host_copy = HostCopy(allocator, cumem.libcudart.cudaMemcpy, cumem.unmap_and_release)
        self._host_copy.begin()

    def put_weights_away(self) -> int:
        """Free what the host copy holds, before the engine's own sleep sees to the rest; bytes."""
        if self._host_copy is None:
            return 0
        current_omni_platform.synchronize()
        return self._host_copy.put_away()

    def release_memory(self) -> None:
        """Give what the last samples used back to the device."""
        current_omni_platform.empty_cache()

    def _named_base(self) -> Iterator[tuple[str, nn.Parameter]]:
        for component in ("transformer", "transformer_2"):
            whole = getattr(self.model_runner.pipeline, component, None)
            for name, parameter in whole.named_parameters() if whole is not None else ():
                yield f"{component}.{name}", parameter

    def engine_facts(self) -> dict[str, Any]:
        """What the server wants to know about this worker."""
        pipeline = self.model_runner.pipeline
        return {
            "policy_version": int(getattr(pipeline, "policy_version", 0)),
            "lora_modules": self._adapters().modules,
            "lora_ids": self._adapters().list_adapters(),
            "prompts_cached": len(getattr(pipeline, "_prompt_cache", ())),
        }


def _from_all_ranks(value: Any) -> list[Any]:
    """Every tensor-parallel rank's value, by rank."""
    group = get_tp_group()
    values = [None] * group.world_size
    torch.distributed.all_gather_object(values, value, group=group.cpu_group)
    return values
