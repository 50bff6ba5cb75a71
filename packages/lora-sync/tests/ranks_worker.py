"""One gloo rank of the distributed tests; run by test_lora_ranks.py as `python ranks_worker.py RANK WORLD STORE OUT`.

Writes {check: result} as JSON. Collective calls are in the same order on every rank, whatever the results are.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from lora_sync import (
    LoRAAdapterMixin,
    LoRAPayload,
    LoRASyncError,
    apply_lora,
    base_weights,
    content_sum,
    extract_lora,
    fingerprint,
    load_weights,
    stream_lora,
    stream_weights,
    use_adapter,
    verify,
)
from lora_sync.layers import adapter_parameters
from lora_sync.transport import BroadcastTransport, join_group
from lora_sync.weights import WeightBucket
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor


class Layer(nn.Module):
    """The attributes of PEFT's LoRA layer that lora_sync uses; importing PEFT itself takes ten seconds per process."""

    def __init__(self, base: nn.Linear, adapters: tuple[str, ...], rank: int, alpha: float) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_A = nn.ModuleDict({name: nn.Linear(base.in_features, rank, bias=False) for name in adapters})
        self.lora_B = nn.ModuleDict({name: nn.Linear(rank, base.out_features, bias=False) for name in adapters})
        self.r, self.lora_alpha = dict.fromkeys(adapters, rank), dict.fromkeys(adapters, alpha)
        self.scaling = dict.fromkeys(adapters, alpha / rank)
        self.merged_adapters: list[str] = []
        self._active_adapter, self._disable_adapters = [adapters[0]], False

    merged = property(lambda self: bool(self.merged_adapters))
    active_adapters = property(lambda self: self._active_adapter)

    def get_base_layer(self) -> nn.Module:
        return self.base_layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.base_layer(x)
        for name in () if self._disable_adapters or self.merged else self._active_adapter:
            out = out + self.lora_B[name](self.lora_A[name](x)) * self.scaling[name]
        return out


class Block(nn.Module):
    """Sizes that no small number of ranks divides evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (Layer(nn.Linear(*size), ("default", "old"), 4, 6) for size in ((10, 7), (7, 10)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Policy(LoRAAdapterMixin):
    def __init__(self, module: nn.Module) -> None:
        self.module = module


def model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(Block(), Block(), Layer(nn.Linear(10, 5), ("default", "old"), 4, 6))


def shard(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    for block in (module[0], module[1]):
        fully_shard(block, mesh=mesh)
    fully_shard(module, mesh=mesh)
    return module


def rank_coded_fill(mesh: DeviceMesh) -> bool:
    """Each rank writes rank·10⁶ + running index into its own shards; the gathered tensors must show exactly that."""
    module = shard(model(), mesh)
    rank, ranks = mesh.get_local_rank(), mesh.size()
    for parameter in adapter_parameters(module, "default").values():
        shard_ = parameter.to_local()
        shard_.data.copy_(rank * 1e6 + torch.arange(shard_.numel(), dtype=torch.float32).reshape(shard_.shape))
    gathered: list[torch.Size] = []
    real = DTensor.full_tensor

    def recording(self, **kwargs):
        gathered.append(self.shape)
        return real(self, **kwargs)

    DTensor.full_tensor = recording
    try:
        payload = extract_lora(module, version=1)
    finally:
        DTensor.full_tensor = real
    good = True
    for tensor in payload.tensors.values():
        parts = torch.arange(tensor.shape[0]).chunk(ranks)  # FSDP2 cuts the first dimension like torch.chunk
        wanted = [
            owner * 1e6 + torch.arange(len(rows) * tensor.shape[1], dtype=torch.float32).reshape(len(rows), -1)
            for owner, rows in enumerate(parts)
        ]
        good &= torch.equal(tensor, torch.cat(wanted))
    shapes = {tuple(t.shape) for t in payload.tensors.values()}
    return good and len(gathered) == len(payload.tensors) and all(tuple(s) in shapes for s in gathered)


def adapters_match_unsharded(mesh: DeviceMesh) -> dict[str, bool]:
    plain, sharded = model(), shard(model(), mesh)
    x = torch.linspace(-1, 1, 10)[None]
    out: dict[str, bool] = {}
    with torch.no_grad():
        first = sharded(x)  # leaves the root's full parameters registered
        out["forward"] = torch.allclose(first, plain(x), atol=1e-6)
        for module in (plain, sharded):
            Policy(module).ema_update_adapter("default", "old", 0.9)
        whole, parts = (extract_lora(module, "old", version=0).tensors for module in (plain, sharded))
        out["ema"] = all(
            torch.allclose(parts[n], whole[n], rtol=1e-6, atol=1e-7) for n in whole
        )  # other vector lengths
        for module in (plain, sharded):
            Policy(module).copy_adapter("old", "default")
        out["copy"] = extract_lora(sharded, version=0).hash == extract_lora(sharded, "old", version=0).hash
        with use_adapter(sharded, "reference"), use_adapter(plain, "reference"):
            out["reference"] = torch.allclose(sharded(x), plain(x), atol=1e-6)
            with use_adapter(sharded, "old"), use_adapter(plain, "old"):
                out["nested"] = torch.allclose(sharded(x), plain(x), atol=1e-6)
                out["seen"] = not torch.allclose(sharded(x), first, atol=1e-4)
        out["restored"] = sharded[2]._active_adapter == ["default"]
        sharded(x)
        out["stream after forward"] = len(list(stream_lora(sharded))) == 10
    out["fingerprint"] = fingerprint(plain) == fingerprint(sharded)
    payload = extract_lora(model(seed=3), version=2)
    receipt = apply_lora(sharded, payload)
    out["apply"] = verify(payload, receipt) is receipt and extract_lora(sharded, version=0).hash == payload.hash
    apply_lora(plain, payload)
    buckets = list(stream_weights(base_weights(sharded, "default"), version=3, bucket_bytes=400))
    wanted = list(stream_weights(base_weights(plain, "default"), version=3, bucket_bytes=400))
    pairs = [(a.tensors[n], t) for a, b in zip(buckets, wanted, strict=True) for n, t in b.tensors.items()]
    out["merged weights"] = len(buckets) > 2 and all(torch.allclose(a, b, atol=1e-6) for a, b in pairs)
    receipt_w = load_weights(sharded, stream_weights(base_weights(model(seed=9)), version=4))
    out["load weights"] = receipt_w.checksum == content_sum(value for _, value in base_weights(model(seed=9)))
    return out


def broadcasts(rank: int) -> dict[str, bool]:
    out: dict[str, bool] = {}
    channel = BroadcastTransport(source=0)
    payload = extract_lora(model(seed=4), version=7)
    if rank == 0:
        channel.send(payload, timeout=30)
        got: object = payload
    else:
        got = channel.receive(timeout=30)
    out["payload"] = isinstance(got, LoRAPayload) and got.hash == payload.hash and got.version == 7
    wanted = list(stream_weights(base_weights(model(seed=5)), version=8, bucket_bytes=400))
    if rank == 0:
        for bucket in wanted:
            channel.send(bucket, timeout=30)
        out["buckets"] = True
    else:
        got_buckets = [channel.receive(timeout=30) for _ in wanted]
        last = got_buckets[-1]
        out["buckets"] = isinstance(last, WeightBucket) and last.last and last.hash == wanted[-1].hash
    shared = extract_lora(model(seed=6), version=9, copy=False)
    next(iter(shared.tensors.values())).add_(1)  # trained on while it was being sent
    try:
        channel.send(shared, timeout=30) if rank == 0 else channel.receive(timeout=30)
        out["corrupt"] = False
    except LoRASyncError as error:
        out["corrupt"] = type(error).__name__ == ("TransportError" if rank == 0 else "CorruptPayloadError")
    if rank == 0:
        channel.send(payload, timeout=30)  # the channel still works
    else:
        channel.receive(timeout=30)
    group = dist.new_group()
    silent = BroadcastTransport(source=0, group=group)
    if rank != 0:
        try:
            silent.receive(timeout=0.3)
            out["timeout"] = False
        except LoRASyncError as error:
            out["timeout"] = type(error).__name__ == "TransportTimeoutError"
        try:
            silent.receive(timeout=0.3)
            out["broken"] = False
        except LoRASyncError as error:
            out["broken"] = "unknown state" in str(error)
    dist.barrier()
    out["own group"] = beside_the_default_group(rank, payload)
    return out


def beside_the_default_group(rank: int, payload: LoRAPayload) -> bool:
    """Ranks 1 and 2 of the world, as 0 and 1 of a group that it knows nothing about."""
    port = torch.zeros(1, dtype=torch.int64)
    if rank == 1:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port[0] = probe.getsockname()[1]
    dist.broadcast(port, 1)
    if rank == 0:
        return True
    group = join_group(f"127.0.0.1:{int(port)}", rank - 1, 2, device="cpu", timeout=2)
    channel = BroadcastTransport(group=group)
    if rank == 1:
        time.sleep(2.5)  # longer than the group had to come together: a message has its own deadline
        channel.send(payload, timeout=30)
        return True
    got = channel.receive(timeout=30)
    return isinstance(got, LoRAPayload) and got.hash == payload.hash


def death(rank: int, world: int) -> dict[str, bool]:
    """The last rank dies while a message is on its way."""
    channel = BroadcastTransport(source=0)
    payload = LoRAPayload.build(
        {"x.lora_A.weight": torch.randn(8, 1 << 16), "x.lora_B.weight": torch.randn(8, 8)}, alphas=1.0, version=1
    )
    if rank == world - 1:
        os._exit(0)
    if rank == 0:
        try:
            channel.send(payload, timeout=20)
            return {"dead receiver": False}
        except LoRASyncError as error:
            return {"dead receiver": type(error).__name__ in ("TransportError", "TransportTimeoutError")}
    return {}


def main() -> None:
    rank, world, store, out = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
    result: dict[str, object] = {}
    for ranks in range(2, world + 1):
        mesh = DeviceMesh("cpu", list(range(ranks)))
        if rank < ranks:
            result[f"fill {ranks}"] = rank_coded_fill(mesh)
            result[f"adapters {ranks}"] = adapters_match_unsharded(mesh)
        dist.barrier()
    result["broadcast"] = broadcasts(rank)
    out.write_text(json.dumps(result))
    result |= death(rank, world)
    out.write_text(json.dumps(result))
    os._exit(0)  # the group has a dead member: leave without the farewell


if __name__ == "__main__":
    main()
