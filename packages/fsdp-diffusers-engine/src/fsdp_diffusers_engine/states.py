"""Policy states of a full fine-tuning: named copies of the trained weights that can take their place for a while.

With a LoRA, a policy state is another adapter beside the trained one (lora-sync does that). Without one, a state is a copy
of every trained parameter, shard by shard, that is swapped in and out; the optimizer's parameters stay the same objects.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from lora_sync.adapters import LoRAAdapterMixin
from lora_sync.layers import adapter_names, local
from torch import Tensor, nn

from . import adapters
from .errors import EngineError, nearest


class WeightStates:
    """Copies of `parameters` by name of the state.

    Args:
        parameters: name → trained parameter; shards stay shards.
        names: states to keep, each a copy of the present weights.
        before_change: called before weights change, to drop gathered copies of them.
        device: where the copies wait; None: beside the parameters.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        names: list[str],
        before_change: Callable[[], None],
        device: torch.device | None = None,
    ):
        self.parameters = dict(parameters)
        self.before_change = before_change
        self.copies: dict[str, dict[str, Tensor]] = {
            state: {name: p.detach().to(device, copy=True) for name, p in self.parameters.items()} for state in names
        }
        self.active: str | None = None

    def copy_of(self, name: str) -> dict[str, Tensor]:
        """The kept tensors of a state by name."""
        if name not in self.copies:
            raise EngineError(
                f"policy state {name!r} is not kept (there are {['default', *self.copies]}, nearest "
                f"{nearest(name, ['default', *self.copies], 1)}); add it to policy_state_adapters"
            )
        return self.copies[name]

    @contextmanager
    def use(self, name: str) -> Iterator[None]:
        """Run with the weights of state `name`; re-entrant for the same name."""
        if name in ("default", self.active):
            if name == "default" and self.active is not None:
                raise EngineError(f"'default' was asked for inside use_adapter({self.active!r}); leave that first")
            yield
            return
        if self.active is not None:
            raise EngineError(f"use_adapter({name!r}) inside use_adapter({self.active!r}); leave that first")
        copies = self.copy_of(name)
        self._swap(copies)
        self.active = name
        try:
            yield
        finally:
            self._swap(copies)
            self.active = None

    @torch.no_grad()
    def _swap(self, copies: Mapping[str, Tensor]) -> None:
        self.before_change()
        for name, parameter in self.parameters.items():
            ours, theirs = local(parameter), local(copies[name])
            kept = ours.clone()
            ours.copy_(theirs)
            theirs.copy_(kept)

    @torch.no_grad()
    def blend(self, source: str, target: str, decay: float) -> None:
        """`target ← decay · target + (1 - decay) · source`; decay 0 copies."""
        if not 0.0 <= decay <= 1.0:
            raise EngineError(f"decay={decay!r} must be in [0, 1]")
        if self.active is not None:
            raise EngineError(f"a policy state changes inside use_adapter({self.active!r}); leave that first")
        self.before_change()
        from_, to = self._tensors(source), self._tensors(target)
        for name, tensor in to.items():
            ours, theirs = local(tensor), local(from_[name])
            if decay == 0.0:
                ours.copy_(theirs)
            else:
                ours.lerp_(theirs.to(ours), 1.0 - decay)

    def _tensors(self, name: str) -> Mapping[str, Tensor]:
        return self.parameters if name == "default" else self.copy_of(name)


class PolicyStatesMixin(LoRAAdapterMixin):
    """The engine's named policies behind one set of calls, whichever way they are kept.

    `states` is None while adapters are trained: then a policy state is an adapter.
    """

    states: WeightStates | None

    def _need(self, what: str) -> None:
        """Refuse a call that comes before the module exists."""
        raise NotImplementedError

    @contextmanager
    def use_adapter(self, name: str) -> Iterator[None]:
        """Run with the policy state `name`; `reference` is the base (LoRA) or the kept start (full)."""
        self._need("use_adapter")
        known = [adapters.REFERENCE, *adapter_names(self.module)]
        if self.states is None and name not in known:
            raise EngineError(
                f"policy state {name!r} is not kept (there are {known}, nearest {nearest(name, known, 1)}); add it to "
                f"policy_state_adapters"
            )
        with super().use_adapter(name) if self.states is None else self.states.use(name):
            yield

    @contextmanager
    def disable_adapter(self) -> Iterator[None]:
        """Run as the reference policy."""
        with self.use_adapter(adapters.REFERENCE):
            yield

    def copy_adapter(self, source: str = adapters.TRAINED, target: str = "old") -> None:
        """Copy one policy state onto another, bitwise."""
        self._need("copy_adapter")
        if self.states is None:
            super().copy_adapter(source, target)
        else:
            self.states.blend(source, target, 0.0)

    def ema_update_adapter(self, source: str = adapters.TRAINED, target: str = "old", decay: float = 0.0) -> None:
        """`target ← decay · target + (1 - decay) · source`."""
        self._need("ema_update_adapter")
        if self.states is None:
            super().ema_update_adapter(source, target, decay)
        else:
            self.states.blend(source, target, decay)
