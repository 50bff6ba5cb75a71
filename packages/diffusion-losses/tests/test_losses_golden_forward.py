"""DiffusionNFT, Diffusion-DPO and AWM against reference vectors."""

from __future__ import annotations

import pytest
import torch
from diffusion_losses import DiffusionLossConfig, diffusion_loss, matching_log_prob, nft_terms, optimality_probability

close = torch.testing.assert_close


@pytest.mark.golden("loss_nft", "")
@pytest.mark.parametrize("own_noising", [False, True], ids=["x_t", "noise"])
def test_diffusion_nft(vector, own_noising):
    given, want, params = vector.given, vector.want, vector.params
    config = DiffusionLossConfig(
        "diffusion_nft",
        mix_beta=params["beta"],
        adv_clip_max=params["adv_clip_max"],
        ref_kl_coef=params["kl_beta"],
        adv_mode=params["adv_mode"],
    )
    velocity = given["v"].clone().requires_grad_()
    data = {"x0": given["x0"], "sigma": given["t"], "advantages": given["advantages"]}
    data |= {"old_velocity": given["v_old"], "ref_velocity": given["v_ref"]}
    data |= {"noise": given["noise"]} if own_noising else {"x_t": given["x_t"]}
    out = diffusion_loss(config, {"velocity": velocity}, data)
    out.loss.backward()
    half = params["pred_dtype"] == "bf16"
    close(out.loss.detach().double(), want["loss"], rtol=2e-5 if own_noising else 2e-6, atol=0)
    close(out.loss.detach(), want["loss_verl_omni"], rtol=2e-5 if own_noising else 2e-6, atol=0)
    scale = want["grad_v"].abs().max().item()
    tolerance = 4e-3 if half else 1e-5
    close(velocity.grad, want["grad_v"], rtol=tolerance, atol=tolerance * scale)
    metrics = out.metrics
    close(metrics["actor/kl_loss"], want["kl"].float(), rtol=4e-3 if half else 1e-6, atol=0)
    close(metrics["actor/nft_unscaled_loss"].double(), want["unweighted"], rtol=2e-5, atol=0)
    policy = metrics["actor/nft_unscaled_loss"].double() * params["adv_clip_max"]
    close(policy, want["policy_loss"], rtol=2e-5, atol=0)


@pytest.mark.golden("loss_nft", "")
def test_nft_terms(vector):
    given, want, params = vector.given, vector.want, vector.params
    probability = optimality_probability(given["advantages"], params["adv_clip_max"], params["adv_mode"])
    close(probability, want["r"], rtol=0, atol=0)
    terms = nft_terms(
        given["v"], given["v_old"], given["x0"], given["x_t"], given["t"], probability, beta=params["beta"]
    )
    close(terms.positive.double(), want["positive_loss"], rtol=2e-6, atol=0)
    close(terms.negative.double(), want["negative_loss"], rtol=2e-6, atol=0)
    close(terms.mixed.double().mean(), want["unweighted"], rtol=2e-6, atol=0)


@pytest.mark.golden("loss_dpo", "")
def test_diffusion_dpo(vector):
    """FlowGRPO's vectors come in halves; here the same rows are interleaved."""
    order = torch.arange(vector.given["latents"].shape[0]).reshape(2, -1).T.flatten()
    given = {name: tensor[order] for name, tensor in vector.given.items()}
    config = DiffusionLossConfig("dpo", dpo_beta=vector.params["beta"])
    velocity = given["v_theta"].clone().requires_grad_()
    data = {"x0": given["latents"], "noise": given["noise"], "ref_velocity": given["v_ref"]}
    out = diffusion_loss(config, {"velocity": velocity}, data)
    out.loss.backward()
    close(out.loss.detach(), vector.want["loss"], rtol=2e-6, atol=0)
    close(velocity.grad, vector.want["grad_v_theta"][order], rtol=1e-5, atol=1e-6)
    close(out.metrics["actor/dpo_margin"], vector.want["inside"].mean(), rtol=1e-5, atol=1e-6)
    close(out.metrics["actor/dpo_accuracy"], (vector.want["inside"] > 0).float().mean())


AWM_NAMES = {"Uniform": "uniform", "t": "t", "t**2": "t2", "huber": "huber", "ghuber": "ghuber"}


@pytest.mark.golden("loss_awm", "")
def test_awm_log_prob(vector):
    given, params = vector.given, vector.params
    result = matching_log_prob(
        given["v"],
        given["target"],
        given["t1000"] / 1000.0,
        weighting=AWM_NAMES[params["weighting"]],
        power=params["ghuber_power"],
    )
    close(result.float(), vector.want["log_prob"], rtol=2e-6, atol=1e-9)
