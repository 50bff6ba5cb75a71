"""The watchdog: each rule on rows where it must and must not speak, how long it waits, and what a resumed run remembers."""

import math

import numpy as np
import pytest
from image_rewards.quality import look_of
from ray_trainer.config import WatchdogConfig, WatchRule
from ray_trainer.errors import TrainerError
from ray_trainer.watchdog import Watchdog, check_held_out

CALM = {
    "advantages/groups": 6.0, "advantages/equal_groups": 1.0, "actor/ratio_max": 1.2, "actor/ratio_min": 0.8, "actor/kl_loss": 0.01,
    "actor/grad_norm": 1.0, "rollout/saturation": 0.4, "rollout/sharpness": 0.1, "rollout/diversity": 0.2, "reward/mean": 0.5,
}  # fmt: skip
BROKEN = {
    "flat_groups": {"advantages/equal_groups": 6.0},
    "ratio": {"actor/ratio_min": 0.05},
    "kl": {"actor/kl_loss": math.nan},
    "grad_norm": {"actor/grad_norm": 11.0},
    "saturation": {"rollout/saturation": 0.9},
    "sharpness": {"rollout/sharpness": 0.01},
    "diversity": {"rollout/diversity": 0.01},
}


def run(rows, config=None):
    """(step, rule) of every alarm."""
    dog, found = Watchdog(config or WatchdogConfig()), []
    for step, row in enumerate(rows, 1):
        found += [(step, broken.name) for broken in dog.look(step, row)]
        dog.remember(row)
    return found


@pytest.mark.parametrize("name", BROKEN)
def test_a_rule_speaks_once_after_its_steps_in_a_row_and_not_before(name):
    steps = getattr(WatchdogConfig(), name).steps
    calm, bad = [CALM] * 5, CALM | BROKEN[name]
    assert run(calm + [bad] * (steps - 1) + [CALM] + [bad] * (steps - 1)) == []
    assert run(calm + [bad] * (steps + 3)) == [(5 + steps, name)]
    off = WatchdogConfig(**{name: WatchRule(getattr(WatchdogConfig(), name).bound, steps, "off")})
    assert run(calm + [bad] * (steps + 3), off) == []


def test_pairs_that_no_prompt_gives_are_flat_groups_too():
    assert run([{"pairs/pairs": 0.0}] * 10) == [(10, "flat_groups")]
    assert run([{"pairs/pairs": 1.0}] * 10) == []


def test_a_reward_that_rises_while_a_held_out_measure_falls():
    def rows(clean, reward):
        first = {"val/reward_mean": 0.5, "val/reward_stderr": 0.01, "val/clean_mean": 0.98, "val/clean_stderr": 0.01}
        late = first | {"val/clean_mean": clean}
        climb = [CALM | {"reward/mean": 0.5 + reward * i} for i in range(8)]
        return [first, *climb[:-1], climb[-1] | late, CALM]

    both = WatchdogConfig(held_out=["reward", "clean"])
    assert run(rows(0.80, 0.01), both) == [(10, "hacking")]  # 12.7 standard errors
    assert run(rows(0.80, 0.01)) == []  # nobody asked about clean
    assert run(rows(0.95, 0.01), both) == []  # two standard errors
    assert run(rows(0.80, -0.01), both) == []  # everything falls: that is another fault
    with pytest.raises(TrainerError, match="names 'cleen', and validation has reward, clean"):
        check_held_out(
            WatchdogConfig(held_out=["cleen"]), {"val/reward_mean": 1.0, "val/clean_mean": 1.0, "val/failed": 0.0}
        )


def test_a_resumed_run_counts_on_and_remembers_that_it_went_back():
    bad = CALM | BROKEN["kl"]
    rows = [{"step": step, **row} for step, row in enumerate([CALM, CALM, bad, bad], 1)]
    dog = Watchdog(WatchdogConfig(), rows)
    assert [(one.name, one.since) for one in dog.look(5, bad)] == [("kl", 3)]
    rows[-1] = rows[-1] | {"watchdog/went_back_to": 2.0}
    dog = Watchdog(WatchdogConfig(), rows)
    assert dog.returns == 1
    assert dog.look(5, bad) == []  # older weights train on: counting began anew


def test_what_a_picture_looks_like_is_seen_in_its_numbers():
    noise = np.random.default_rng(0).integers(0, 256, (3, 64, 64), np.uint8)
    grey, red = np.full((3, 512, 300), 128, np.uint8), np.zeros((3, 64, 64), np.uint8)
    red[0] = 255
    assert look_of(grey)[:2] == (0.0, 0.0)
    assert look_of(red)[:3] == (1.0, 0.0, 1.0)
    assert look_of(noise)[1] > 0.1
    assert look_of(np.stack([grey, grey, grey]))[0] == 0.0
    assert len(look_of(noise)) == len(look_of(np.zeros((3, 9, 700), np.uint8))) == 2 + 3 * 16
