"""Floating-point operations of a transformer's forward, counted by formula.

A multiply-add is two operations; only matrix products count (linear layers, convolutions, attention), as in
`torch.utils.flop_counter`, against which the tests hold every architecture within 1 %. Each spec's `flops` composes
these helpers, beside the network that it describes.
"""

from __future__ import annotations


def linear(tokens: float, inputs: int, outputs: int) -> float:
    """`tokens` rows through a Linear layer."""
    return 2.0 * tokens * inputs * outputs


def attention(batch: float, queries: float, keys: float, width: int) -> float:
    """Scores and weighted sum of scaled dot-product attention, `width` = heads * head dimension. No projections."""
    return 4.0 * batch * queries * keys * width


def joint_block(batch: float, image: int, text: int, width: int) -> float:
    """A block of two streams that attend together: modulation, projections, attention, and an MLP for each."""
    both = batch * (image + text)
    mixed = linear(both, width, 4 * width) + attention(batch, image + text, image + text, width)
    return linear(batch, width, 12 * width) + mixed + 2 * linear(both, width, 4 * width)


def training_flops(forward: float, *, full: bool = False, gradient_checkpointing: bool = False) -> float:
    """Operations of forward plus backward, from those of one forward.

    Args:
        forward: `spec.flops(...)`.
        full: every weight has a gradient (backward costs two forwards). With a LoRA on a frozen base it costs one,
            because only activations need gradients through the base; the adapters' own products are left out.
        gradient_checkpointing: the forward runs once more.
    """
    return forward * (1 + (2 if full else 1) + (1 if gradient_checkpointing else 0))
