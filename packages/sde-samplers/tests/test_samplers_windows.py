"""Windows beyond the reference vectors: pure functions of (seed, training step), never empty unless asked for."""

from __future__ import annotations

import pytest
import sde_samplers as ss


def starts(window: ss.Progressive, steps: int) -> list[int]:
    return [window.start(i) for i in range(steps)]


def test_fixed() -> None:
    assert ss.Fixed((4, 1, 2)).steps(7) == (1, 2, 4)
    assert ss.Fixed(()).steps(0) == ()


def test_random_is_a_function_of_seed_and_step() -> None:
    window = ss.Random(3, (1, 9), seed=5)
    drawn = [window.steps(i) for i in range(200)]
    assert drawn == [ss.Random(3, (1, 9), seed=5).steps(i) for i in range(200)]
    assert {w[0] for w in drawn} == set(range(1, 7))
    assert all(w == tuple(range(w[0], w[0] + 3)) for w in drawn)
    slow = ss.Random(3, (1, 9), seed=5, period=10)
    assert all(slow.steps(i) == slow.steps(10 * (i // 10)) == window.steps(i // 10) for i in range(50))


def test_progressive_full_windows_reach_the_end_and_roll_back() -> None:
    window = ss.Progressive(4, (0, 10), period=2, stride=4)
    assert starts(window, 8) == [0, 0, 4, 4, 6, 6, 0, 0]
    assert all(len(window.steps(i)) == 4 for i in range(50))
    assert {p for i in range(6) for p in window.steps(i)} == set(range(10))


def test_progressive_clamped_is_verl_omnis_window() -> None:
    low, high, size, period = 1, 10, 4, 3
    window = ss.Progressive(size, (low, high), period=period, stride=size, at_end="clamp")
    for step in range(40):
        start = min(low + (step // period) * size, high - size)
        assert window.steps(step) == tuple(range(start, start + size))


@pytest.mark.parametrize("at_end", ["roll_back", "clamp"])
def test_only_the_published_edge_trains_nothing(at_end: str) -> None:
    for edge in ("full", "cut"):
        window = ss.Progressive(4, (0, 10), period=3, stride=2, at_end=at_end, edge=edge)
        assert all(window.steps(i) for i in range(80))
    published = ss.Progressive(4, (0, 10), period=3, stride=2, at_end=at_end, edge="empty")
    assert any(not published.steps(i) for i in range(80))


def test_cut_trains_what_is_left() -> None:
    window = ss.Progressive(4, (0, 10), period=1, stride=4, edge="cut")
    assert [window.steps(i) for i in range(4)] == [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9), (0, 1, 2, 3)]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ss.Fixed((1, 1)), "distinct"),
        (lambda: ss.Fixed((-1,)), "negative"),
        (lambda: ss.Random(5, (0, 4)), "range"),
        (lambda: ss.Random(0, (0, 4)), "size"),
        (lambda: ss.Random(2, (-1, 4)), "range"),
        (lambda: ss.Random(2, (0, 4), period=0), "period"),
        (lambda: ss.Progressive(2, (0, 4), stride=0), "stride"),
        (lambda: ss.Progressive(2, (0, 4), at_end="stop"), "at_end"),
        (lambda: ss.Progressive(2, (0, 4), edge="open"), "edge"),
        (lambda: ss.Progressive(2, (0, 4)).steps(-1), "training_step"),
        (lambda: ss.Fixed((1,)).steps(-1), "training_step"),
    ],
)
def test_bad_windows_are_refused(make: object, message: str) -> None:
    with pytest.raises(ss.SamplerError, match=message):
        make()  # type: ignore[operator]
