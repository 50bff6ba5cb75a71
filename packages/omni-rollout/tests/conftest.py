"""Fixtures: requests, a backend made of arithmetic (no model), and the tiny policy."""

import hashlib
import time
from pathlib import Path

import pytest
import torch
from omni_rollout.lifecycle import Lifecycle
from omni_rollout.types import DiffusionOutput, GenerationRequest, aborted

TINY = Path(__file__).resolve().parents[2] / "ray-trainer" / "src" / "ray_trainer" / "assets" / "tiny_qwen_image"


def pytest_configure():
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny() -> str:
    """Folder of the tiny Qwen-Image policy."""
    return str(TINY)


@pytest.fixture
def make_request():
    """Builds requests with the defaults of the tiny policy; uid, index and id follow from the number."""

    def make(number: int = 0, **changes) -> GenerationRequest:
        fields = {
            "request_id": f"r{number}", "uid": f"u{number // 4}", "index": number % 4, "seed": 7,
            "prompt": "three red circles on a black background", "height": 64, "width": 64, "num_inference_steps": 6,
            "kind": "flow_sde", "noise_level": 0.7, "window": (0, 1),
        }  # fmt: skip
        return GenerationRequest(**{**fields, **changes})

    return make


class ArithmeticBackend:
    """Pictures are a hash of (seed, uid, index). It can be told to fail, hang or die, which is all the router sees."""

    def __init__(self, name: str = "a", delay: float = 0.0):
        self.name, self.delay = name, delay
        self.lifecycle = Lifecycle()
        self.lifecycle.load()
        self.lifecycle.loaded()
        self.calls: list[list[str]] = []
        self.errors: list[BaseException] = []
        self.cancelled: set[str] = set()
        self.hang = 0.0

    @property
    def policy_version(self):
        return self.lifecycle.policy_version

    def generate_sequences(self, requests):
        self.calls.append([r.request_id for r in requests])
        if self.errors:
            raise self.errors.pop(0)
        time.sleep(self.hang + self.delay)
        return [self._one(r) for r in requests]

    def _one(self, request):
        if request.request_id in self.cancelled:
            return aborted(request, self.policy_version)
        word = hashlib.sha256(f"{request.seed}|{request.uid}|{request.index}".encode()).digest()
        picture = torch.tensor(list(word[:12]), dtype=torch.uint8).view(3, 2, 2)
        latents = picture.float()
        W = len(request.window)
        extra = {
            "latents": latents.expand(W, 3, 2, 2), "next_latents": latents.expand(W, 3, 2, 2) + 1,
            "step_index": torch.tensor(request.window), "std": torch.ones(W), "final_latents": latents,
            "sigmas": torch.linspace(1, 0, request.num_inference_steps + 1),
            "prompt_embeds": torch.ones(len(request.prompt.split()), 5),
            "prompt_embeds_mask": torch.ones(len(request.prompt.split())).bool(),
            "policy_version": self.policy_version, "seed": request.seed, "schedule_hash": "h", "batch_size": 1,
            "forwards": 6.0,
        }  # fmt: skip
        return DiffusionOutput(picture, torch.arange(W).float(), "completed", 0, extra)

    def update_lora(self, payload, adapter="default"):
        self.lifecycle.policy_version = payload
        return payload

    def abort(self, request_ids):
        self.cancelled |= set(request_ids)
        return len(request_ids)


@pytest.fixture
def arithmetic_backend():
    """The class, so that a test can make several."""
    return ArithmeticBackend
