"""What the compiler is told: GELU without a tanh, the same numbers and gradients; rows of which length are reduced at once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import sympy
import torch
import torch._inductor.config
from model_specs.compiling import along_rows, gelu_gradient, tune_compiler, whole_rows
from torch.nn import functional as F


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-13), (torch.float32, 1e-6), (torch.bfloat16, 2**-7)])
def test_compiled_gelu_has_no_tanh(dtype: torch.dtype, limit: float) -> None:
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd
    from torch._inductor.decomposition import select_decomp_table

    seen: set[str] = set()

    def keep(graph: torch.fx.GraphModule, _: Any) -> Any:
        seen.update(str(node.target) for node in graph.graph.nodes)
        return make_boxed_func(graph.forward)

    select_decomp_table()  # it keeps a copy of what was there
    tune_compiler()
    tune_compiler()
    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep, decompositions=select_decomp_table())
    compiled = torch.compile(lambda x: F.gelu(x, approximate="tanh"), backend=backend, fullgraph=True)
    numbers = (4 * torch.randn(4096, generator=torch.Generator().manual_seed(0))).to(dtype)
    given = [numbers.clone().requires_grad_() for _ in range(2)]
    found, wanted = compiled(given[0]), F.gelu(given[1], approximate="tanh")
    assert found.dtype == dtype
    for output in (found, wanted):
        output.square().sum().backward()
    assert (found - wanted).abs().max() <= limit * wanted.abs().max()
    assert (given[0].grad - given[1].grad).abs().max() <= 2 * limit * given[1].grad.abs().max()
    assert any("sigmoid" in name for name in seen)
    assert not [name for name in seen if "tanh" in name or "gelu" in name]


def test_the_exact_gelu_stays() -> None:
    from torch._inductor.decomposition import select_decomp_table

    tune_compiler()
    x, grad = torch.randn(64), torch.randn(64)
    gelu = torch.ops.aten.gelu.default
    assert (select_decomp_table()[gelu](x) - F.gelu(x)).abs().max() < 1e-6
    assert gelu_gradient(lambda *given, **form: (given, form), grad, x) == ((grad, x), {"approximate": "none"})


def test_rows_of_a_model_are_reduced_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that lie in memory one number after the other, up to a limit; what the compiler decides by itself stays."""
    from torch._inductor.scheduler import Scheduler

    found: list[Any] = []
    original = Scheduler._init

    class PlannedError(Exception):
        """No kernel is made."""

    def keep(self: Any, nodes: Any) -> None:
        original(self, nodes)
        parts = [part for node in self.nodes for part in node.get_nodes()]
        found.extend(part for part in parts if part.is_reduction())
        raise PlannedError

    monkeypatch.setattr(Scheduler, "_init", keep)

    def reductions(function: Any, *shape: int) -> list[Any]:
        torch._dynamo.reset()
        found.clear()
        off = torch._inductor.config.patch(force_disable_caches=True)
        with off, torch.no_grad(), pytest.raises(Exception, match="PlannedError"):
            torch.compile(function, fullgraph=True)(torch.randn(*shape))
        assert found
        return list(found)

    norm = reductions(lambda x: F.layer_norm(x, x.shape[-1:]) * 2, 5, 3072)
    columns = reductions(lambda x: x.sum(0), 3072, 5)
    assert all(map(along_rows, norm))
    assert not any(map(along_rows, columns))

    def decided(nodes: list[Any], length: int, cooperative: bool = False, stock: bool = False) -> bool:
        features = SimpleNamespace(reduction_numel=sympy.Integer(length), reduction_nodes=lambda: nodes)
        return whole_rows(lambda *_: stock, features, cooperative)

    assert [decided(norm, length) for length in (1024, 3072, 16384, 16385)] == [False, True, True, False]
    assert not decided(norm, 3072, cooperative=True)
    assert not decided(columns, 3072)
    assert decided(columns, 3072, stock=True)
