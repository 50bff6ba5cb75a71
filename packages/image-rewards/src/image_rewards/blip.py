"""`image_reward`: ImageReward (Xu et al., 2023, arXiv:2304.05977), a BLIP whose prompt tokens attend to the picture's.

A small head turns the first token into a number, shifted and scaled to mean 0 and deviation 1 over the authors' pictures.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .base import RewardResult, RewardSample
from .checkpoints import split_image_reward
from .clip import mlp_head
from .model import ModelReward, fill, load_state, need_prompt, processor_of

MEAN, STD = 0.16717362830052426, 1.0333394966054072  # published with the weights
TEXT_TOKENS = 35
PIXEL_MEAN, PIXEL_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
# BLIP with a ViT-L/16 at 224 pixels and a BERT-base text encoder of 30524 words: the released size.
RELEASED: dict[str, Any] = {
    "vision_config": {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "image_size": 224,
        "patch_size": 16,
    },
    "text_config": {"vocab_size": 30524, "encoder_hidden_size": 1024},
}


@dataclass(eq=False, kw_only=True)
class ImageRewardReward(ModelReward):
    """score = ImageReward, about -2 to 2.

    Args:
        checkpoint: the released ImageReward.pt, or the same table as .safetensors
        tokenizer: folder or hub id of BERT's tokenizer, e.g. "bert-base-uncased"
        config: folder with a BlipConfig for another size; None = the released size
    """

    name = "image_reward"

    checkpoint: str
    tokenizer: str = "bert-base-uncased"
    config: str | None = None

    def check_target(self, prompt: str, metadata: Mapping[str, Any]) -> None:
        need_prompt(self.name, prompt)

    def load(self) -> None:
        from transformers import AutoTokenizer, BlipConfig, BlipVisionModel
        from transformers.image_utils import PILImageResampling
        from transformers.models.blip.image_processing_blip import BlipImageProcessor
        from transformers.models.blip.modeling_blip_text import BlipTextModel

        config: Any = (
            BlipConfig.from_dict(RELEASED) if self.config is None else processor_of(BlipConfig, self.config, None)
        )
        vision, text = BlipVisionModel(config.vision_config), BlipTextModel(config.text_config, add_pooling_layer=False)
        head = mlp_head(config.text_config.hidden_size)
        tables = split_image_reward(load_state(self.checkpoint))
        for module, table, part in zip((vision, text, head), tables, ("vision", "text", "head"), strict=True):
            state = {k.removeprefix("layers."): v for k, v in table.items()} if part == "head" else table
            fill(module, state, f"{Path(self.checkpoint).name}: {part}", ignore=("position_ids",))
        self._vision, self._text = self.place(vision), self.place(text)
        self._head = head.eval().requires_grad_(False).to(self.device)
        self._tokens = processor_of(AutoTokenizer, self.tokenizer, self.revision)
        side = int(config.vision_config.image_size)
        self._images = BlipImageProcessor(
            size={"height": side, "width": side},
            resample=PILImageResampling.BICUBIC,
            image_mean=list(PIXEL_MEAN),
            image_std=list(PIXEL_STD),
        )

    def score_batch(self, samples: Sequence[RewardSample]) -> list[RewardResult]:
        import torch

        seen = self._vision(pixel_values=self.pixels(self._images, [_square(s) for s in samples])).last_hidden_state
        prompts = [s.prompt for s in samples]
        tokens = self._tokens(
            prompts, padding="max_length", truncation=True, max_length=TEXT_TOKENS, return_tensors="pt"
        ).to(self.device)
        read = self._text(
            input_ids=tokens["input_ids"],
            attention_mask=tokens["attention_mask"],
            encoder_hidden_states=seen,
            encoder_attention_mask=torch.ones(seen.shape[:2], dtype=torch.long, device=self.device),
        ).last_hidden_state[:, 0]
        raw = self._head(read.float())[:, 0].tolist()
        return [RewardResult((r - MEAN) / STD, {"image_reward": (r - MEAN) / STD, "raw": r}) for r in raw]


def _square(sample: RewardSample) -> RewardSample:
    """The middle square of the picture: the released transform scales the shorter side and crops the middle."""
    height, width = sample.image.shape[1:]
    side = min(height, width)
    top, left = (height - side) // 2, (width - side) // 2
    return replace(sample, image=sample.image[:, top : top + side, left : left + side])
