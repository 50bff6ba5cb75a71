"""The kernel that norms, turns and joins heads, run by Triton's interpreter: against the stock attention of compiled blocks."""

import os
import subprocess
import sys

CHECK = """
import copy, torch
from diffusers.models.transformers.transformer_qwenimage import QwenImageTransformerBlock
from fsdp_diffusers_engine import compiling, rotary
from fsdp_diffusers_engine.adapted_linear import AdaptedLinear
from model_specs import joined_heads
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import Linear
from torch._dynamo.utils import counters

torch.manual_seed(0)
block = QwenImageTransformerBlock(48, 3, 16).bfloat16().requires_grad_(False)
for norm in (block.attn.norm_q, block.attn.norm_k, block.attn.norm_added_q, block.attn.norm_added_k):
    torch.nn.init.normal_(norm.weight, 1.0, 0.2)
image, text, temb = (torch.randn(2, *shape, 48).bfloat16() for shape in ((3,), (2,), ()))
angles = [torch.polar(torch.ones(n, 8), torch.randn(n, 8)) for n in (3, 2)]
exact = copy.deepcopy(block).float()
calls = []
attend = rotary.attend_jointly
rotary.attend_jointly = lambda *given: calls.append(1) or attend(*given)
stock = copy.deepcopy(block)
rotary.takes_joined_heads = lambda *_: True
compiling.compile_blocks([])
for mask, backend in ((None, "eager"), (torch.tensor([[True] * 2, [True, False]]), "aot_eager")):
    block.compile(backend=backend, fullgraph=True)
    found = []
    for module, kind in ((exact, torch.float32), (stock, torch.bfloat16), (block, torch.bfloat16)):
        given = [each.to(kind).requires_grad_(True) for each in (image, text, temb)]
        before = len(calls)
        out = module(given[0], given[1], mask, given[2], angles)
        assert (len(calls) > before) == (module is block), "the kernel was not used"
        grads = torch.autograd.grad([(each.float() ** 2).sum() for each in out], given)
        found.append([each.float() for each in (*out, *grads)])
    for true, theirs, ours in zip(*found):
        own, other = ((each - true).norm() / true.norm() for each in (ours, theirs))
        assert own < 1.5 * other + 1e-3, (own, other)
        assert own < 0.03, own

lora = LoraConfig(r=4, target_modules=["to_q", "to_k", "to_v", "add_q_proj", "add_k_proj"], init_lora_weights=False)
adapted = inject_adapter_in_model(lora, copy.deepcopy(stock))
for layer in adapted.modules():
    if type(layer) is Linear:
        layer.__class__ = AdaptedLinear
compiled, summed = copy.deepcopy(adapted), []
compiled.compile(backend="eager", fullgraph=True)
of_sums = joined_heads.joined_heads_of_sums
joined_heads.joined_heads_of_sums = lambda *given: summed.append(1) or of_sums(*given)
with torch.no_grad():
    wanted, found = (module(image, text, None, temb, angles) for module in (adapted, compiled))
assert len(summed) == 2, summed
for theirs, ours in zip(wanted, found):
    assert (ours - theirs).float().norm() < 0.01 * theirs.float().norm()
more = [torch.randn_like(each) for each in (text, image)]
rest = [torch.ones(16).bfloat16()] * 2 + [torch.view_as_real(each) for each in reversed(angles)] + [1e-6]
found, wanted = of_sums(text, image, *more, *rest), joined_heads.joined_heads(text + more[0], image + more[1], *rest)
off = (found - wanted).float().norm() / wanted.float().norm()
assert off < 0.01, off  # to the bit on a card; the interpreter cuts what a card rounds

joint = [torch.cat([torch.randn_like(each), each, torch.randn_like(each)], dim=-1) for each in (text, image)]
slices = [each[..., 48:96] for each in joint]  # as an engine has them, whose layer gives query, key and value at once
assert not slices[0].is_contiguous()
with torch.profiler.profile() as ran:
    found = joined_heads.joined_heads(*slices, *rest)
copied = [each for each in ran.events() if each.name == "aten::clone"]
assert not copied, "a slice was copied"
assert torch.equal(found, joined_heads.joined_heads(text, image, *rest))

from diffusers.models.transformers.transformer_wan import WanRotaryPosEmbed, WanTransformerBlock
stock = WanTransformerBlock(48, 64, 3, cross_attn_norm=True).bfloat16().requires_grad_(False)
for norm in (stock.attn1.norm_q, stock.attn1.norm_k):
    torch.nn.init.normal_(norm.weight, 1.0, 0.2)
stock = inject_adapter_in_model(LoraConfig(r=4, target_modules=["to_q", "to_v"], init_lora_weights=False), stock)
for layer in stock.modules():
    if type(layer) is Linear:
        layer.__class__ = AdaptedLinear
compiled, exact, turned = copy.deepcopy(stock), copy.deepcopy(stock).float(), []
compiled.compile(backend="eager", fullgraph=True)
rotary.takes_turned_heads = lambda *_: True
of_pairs = joined_heads.turned_heads
joined_heads.turned_heads = lambda *given: turned.append(given[1] is not None) or of_pairs(*given)
tokens, text, temb = (torch.randn(2, *shape, 48).bfloat16() for shape in ((8,), (3,), (6,)))
angles = WanRotaryPosEmbed(16, (1, 2, 2), 32)(torch.zeros(1, 1, 2, 4, 4))
with torch.no_grad():
    true = exact(tokens.float(), text.float(), temb.float(), angles)
    theirs, ours = (module(tokens, text, temb, angles).float() for module in (stock, compiled))
assert turned == [True, False], turned  # the adapter's part with the queries, none with the keys
own, other = ((each - true).norm() / true.norm() for each in (ours, theirs))
assert own < 1.5 * other + 1e-3, (own, other)


class Asked:
    def __getitem__(self, grid):
        grids.append(grid)
        return lambda *given, **shape: None


grids, many = [], 70_000  # tokens of a video of 5 s in 720p
joined_heads._kernel = joined_heads._gradient = Asked()
image, angle = torch.zeros(3, many, 4).bfloat16(), torch.zeros(many, 1, 2)
text, norm = torch.zeros(3, 1, 4).bfloat16(), torch.ones(2).bfloat16()
rest = norm, norm, angle[:1], angle, 1e-6
of_pairs(image, None, torch.ones(4).bfloat16(), angle, 1e-6)
out = joined_heads.joined_heads(text, image, *rest)
of_sums(text, image, text, image, *rest)
joined_heads.joined_heads_gradient(out, text, image, *rest)
assert grids == [(many, 3)] + 3 * [(many + 1, 3)], grids  # CUDA takes up to 65,535 in all places but the first

counters.clear()
torch._dynamo.reset()
dynamic = torch.compile(joined_heads.joined_heads, backend="eager", dynamic=True, fullgraph=True)
for rows in (5, 6, 7):
    dynamic(*(torch.zeros(rows, n, 4).bfloat16() for n in (8, 9)), norm, norm, angle[:8], angle[:9], 1e-6)
assert counters["stats"]["unique_graphs"] == 1, "a graph for each size of a batch"
print("agrees")
"""


def test_joined_heads_compute_what_the_stock_attention_computes():
    """As near to fp32 as bf16 blocks are without it, gradients too, with and without a text mask.

    Graphs are what takes long, so one of them has a gradient's graph as well; the others run as Dynamo gives them.
    """
    env = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", CHECK], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.endswith("agrees\n")
