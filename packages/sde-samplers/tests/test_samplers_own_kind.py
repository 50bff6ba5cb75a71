"""A kind of step from a person's own module: drawn, scored again, mixed with the shipped ones, and refused when it is none."""

import sys

import pytest
import sde_samplers as ss
import torch

SOURCE = """
from sde_samplers import SamplerKind


def half_cps(t, u, eta, cap):
    std = u * eta / 2
    keep = (u * u - std * std) ** 0.5  # works on floats and on tensors
    return (1 - u) + keep, (1 - t) * keep - t * (1 - u), std


HALF = SamplerKind(half_cps, most_noise=1.0, log_prob_form="squared_error")
NOT_A_KIND = 3
"""


@pytest.fixture(scope="module", autouse=True)
def module(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kinds")
    (folder / "kind_of_a_test.py").write_text(SOURCE)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield
        sys.modules.pop("kind_of_a_test", None)


@pytest.mark.parametrize("window", [[1, 2], torch.tensor([[0, 1], [1, 3]])])
def test_it_is_drawn_and_scored_again(window):
    schedule, noise = ss.flow_match(5, 3.0), torch.randn(2, 8, generator=torch.Generator().manual_seed(0))
    z = torch.randn(5, 2, 8, generator=torch.Generator().manual_seed(1))
    kind = "kind_of_a_test:HALF"
    drawn = ss.rollout(
        lambda x, s: 0.3 * x,
        noise,
        schedule,
        kind=kind,
        noise_level=0.8,
        window=window,
        step_noise=z,
        return_means=True,
    )
    assert drawn.kind == kind
    assert drawn.log_prob_form == "squared_error"
    again = list(ss.replay(lambda x, s: 0.3 * x, drawn, schedule))
    assert torch.equal(torch.stack([step.log_prob for step in again], dim=1), drawn.log_probs)
    sigma = schedule.sigmas[drawn.step_index + 1]
    torch.testing.assert_close(drawn.std, 0.4 * sigma)
    # half the share of noise that flow_cps has at this level keeps more of the old one: another mean, the same read-outs
    t = schedule.sigmas[drawn.step_index][..., None]
    x, v, u = drawn.latents, 0.3 * drawn.latents, sigma[..., None]
    keep = (u**2 - (0.4 * u) ** 2).sqrt()
    torch.testing.assert_close(drawn.means, (1 - u) * (x - t * v) + keep * (x + (1 - t) * v))


def test_no_noise_is_an_ode_step_and_settings_know_it():
    kind = "kind_of_a_test:HALF"
    assert ss.step_coefficients(kind, 0.7, 0.4, 0.0) == ss.step_coefficients("ode", 0.7, 0.4, 0.0)
    assert ss.SamplerSettings(64, 64, 4, kind=kind, noise_level=0.5, window=(1,)).kind == kind


@pytest.mark.parametrize(
    ("kind", "level", "words"),
    [
        ("kind_of_a_test:HALF", 1.5, r"must lie in \[0, 1\]"),
        ("kind_of_a_test:NOT_A_KIND", 0.5, "is a int; give a sde_samplers.SamplerKind"),
        ("kind_of_a_test:HALV", 0.5, "cannot be imported"),
        ("nowhere:HALF", 0.5, "cannot be imported: No module named 'nowhere'"),
        ("flow_sd", 0.5, "did you mean 'flow_sde'"),
    ],
)
def test_what_is_no_kind_is_refused(kind, level, words):
    with pytest.raises(ss.SamplerError, match=words):
        ss.step_coefficients(kind, 0.7, 0.4, level)
