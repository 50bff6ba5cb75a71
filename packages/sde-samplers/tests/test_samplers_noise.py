"""Noise belongs to (seed, uid, index), not to a batch."""

from __future__ import annotations

import pytest
import sde_samplers as ss
import torch


def test_the_stream_is_fixed_for_ever() -> None:
    """Numbers that recorded runs depend on: a change here changes every sample of every run."""
    first = torch.randn(2, generator=ss.sample_generator(7, "prompt-3", 1))
    torch.testing.assert_close(first, torch.tensor(PINNED), rtol=0, atol=1e-6)


PINNED = [1.265027, -0.3301176]


def test_batch_order_and_size_do_not_matter() -> None:
    def noise(indices: list[int]) -> torch.Tensor:
        return ss.initial_noise([ss.sample_generator(1, "u", i) for i in indices], (4, 6, 6))

    full = noise([0, 1, 2, 3])
    assert torch.equal(noise([2]), full[2:3])
    assert torch.equal(noise([3, 0]), full[[3, 0]])
    assert full.dtype == torch.float32


def test_seed_uid_and_index_all_count() -> None:
    draws = [
        torch.randn(4, generator=ss.sample_generator(*key)).tolist()
        for key in ((0, "a", 0), (1, "a", 0), (0, "b", 0), (0, "a", 1), (0, "a1", 0), (-1, "a", 0), (0, "a", 10))
    ]
    assert len({tuple(d) for d in draws}) == len(draws)


def test_neighbours_are_uncorrelated() -> None:
    rows = torch.stack([torch.randn(20_000, generator=ss.sample_generator(0, "u", i)) for i in range(6)])
    off_diagonal = torch.corrcoef(rows) - torch.eye(6)
    assert float(off_diagonal.abs().max()) < 0.03


def test_draw_noise_takes_one_or_many_generators() -> None:
    like = torch.empty(3, 5, dtype=torch.bfloat16)
    many = ss.draw_noise(like, [ss.sample_generator(0, "u", i) for i in range(3)])
    assert torch.equal(many, ss.initial_noise([ss.sample_generator(0, "u", i) for i in range(3)], (5,)))
    one = ss.draw_noise(like, torch.Generator().manual_seed(4))
    assert torch.equal(one, torch.randn(3, 5, generator=torch.Generator().manual_seed(4)))
    torch.manual_seed(9)
    default = ss.draw_noise(like, None)
    torch.manual_seed(9)
    assert torch.equal(default, torch.randn(3, 5))
    assert many.dtype == one.dtype == default.dtype == torch.float32


def test_bad_arguments() -> None:
    with pytest.raises(ss.SamplerError, match="seed"):
        ss.sample_generator(1.5, "u", 0)  # type: ignore[arg-type]
    with pytest.raises(ss.SamplerError, match="index"):
        ss.sample_generator(1, "u", -1)
    with pytest.raises(ss.SamplerError, match="one torch.Generator per sample"):
        ss.initial_noise([], (2,))
    with pytest.raises(ss.SamplerError, match="one torch.Generator per sample"):
        ss.initial_noise(torch.Generator(), (2,))  # type: ignore[arg-type]
    with pytest.raises(ss.SamplerError, match="exactly one per sample"):
        ss.draw_noise(torch.empty(3, 2), [torch.Generator()])
