"""Rewards on CLIP and its relatives: how near are picture and prompt, and how pleasing is the picture?

    clip_score   cosine of picture and prompt (Hessel et al., 2021, arXiv:2104.08718)
    pickscore    logit of a CLIP trained on people's choices (Kirstain et al., 2023, arXiv:2305.01569)
    hps          HPS v2.1: cosine of another one (Wu et al., 2023, arXiv:2306.09341)
    siglip       probability of the pair under SigLIP (Zhai et al., 2023, arXiv:2303.15343)
    aesthetic    LAION's head on CLIP ViT-L/14 picture embeddings; reads no prompt

Prompts longer than the text tower's context are cut, and the component `truncated` says so.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from .base import RewardResult, RewardSample
from .checkpoints import clip_from_open_clip
from .errors import require
from .model import ModelReward, fill, from_pretrained, load_state, need_prompt, processor_of


@dataclass(eq=False, kw_only=True)
class ClipScoreReward(ModelReward):
    """score = cosine of the embeddings, in [-1, 1].

    Args:
        path: folder or hub id of a transformers CLIP, e.g. "openai/clip-vit-large-patch14"
        processor: folder or hub id of tokenizer and picture settings; None = `path`

    Components: cosine, truncated (1 where the prompt was cut).
    """

    name = "clip_score"
    model_class: ClassVar[str] = "CLIPModel"
    needs_prompt: ClassVar[bool] = True

    path: str
    processor: str | None = None

    def check_target(self, prompt: str, metadata: Mapping[str, Any]) -> None:
        if self.needs_prompt:
            need_prompt(self.name, prompt)

    def load(self) -> None:
        import transformers

        self._model = self.place(self.load_model(getattr(transformers, self.model_class)))
        path, revision = (self.processor, None) if self.processor else (self.path, self.revision)
        self._images = processor_of(transformers.AutoImageProcessor, path, revision)
        if self.needs_prompt:
            self._tokens = processor_of(transformers.AutoTokenizer, path, revision)
            self._context = int(self._model.config.text_config.max_position_embeddings)

    def load_model(self, cls: Any) -> Any:
        """The network, with weights."""
        return from_pretrained(cls, self.path, self.revision, allowed_missing=("position_ids",))

    def tokenize(self, samples: Sequence[RewardSample]) -> tuple[dict[str, Any], list[float]]:
        """Fixed-length token ids on the device, and which prompts were cut."""
        prompts = [sample.prompt for sample in samples]
        length = self._context
        rows = self._tokens(prompts, padding="max_length", truncation=True, max_length=length, return_tensors="pt")
        whole = self._tokens(prompts, truncation=False, verbose=False)["input_ids"]
        inputs = {k: rows[k].to(self.device) for k in ("input_ids", "attention_mask") if k in rows}
        return inputs, [float(len(ids) > length) for ids in whole]

    def score_batch(self, samples: Sequence[RewardSample]) -> list[RewardResult]:
        inputs, truncated = self.tokenize(samples)
        out = self._model(pixel_values=self.pixels(self._images, samples), **inputs)
        image, text = (x.float() / x.float().norm(dim=-1, keepdim=True) for x in (out.image_embeds, out.text_embeds))
        cosines = (image * text).sum(-1).tolist()
        return [self.result(c, t) for c, t in zip(cosines, truncated, strict=True)]

    def result(self, cosine: float, truncated: float) -> RewardResult:
        """Score and components of one pair."""
        return RewardResult(cosine, {"cosine": cosine, "truncated": truncated})

    def constant(self, name: str) -> float:
        """A learned number of the model, in fp32."""
        return float(getattr(self._model, name).detach().float())


class PickScoreReward(ClipScoreReward):
    """score = exp(logit_scale) * cosine, about 15 to 25 for real pictures (path "yuvalkirstain/PickScore_v1")."""

    name = "pickscore"

    def result(self, cosine: float, truncated: float) -> RewardResult:
        score = math.exp(self.constant("logit_scale")) * cosine
        return RewardResult(score, {"cosine": cosine, "truncated": truncated})


@dataclass(eq=False, kw_only=True)
class HpsReward(ClipScoreReward):
    """score = cosine under HPS v2 or v2.1, about 0.2 to 0.35 for real pictures.

    Args:
        path: a transformers CLIP of the same size, e.g. "laion/CLIP-ViT-H-14-laion2B-s32B-b79K" (for its settings and
            tokenizer), or a converted HPS in transformers' form
        checkpoint: the released file HPS_v2.1_compressed.pt (open_clip names), put into that CLIP; None = `path` has it all
    """

    name = "hps"

    checkpoint: str | None = None

    def load_model(self, cls: Any) -> Any:
        if self.checkpoint is None:
            return super().load_model(cls)
        import transformers

        config = processor_of(transformers.CLIPConfig, self.path, self.revision)
        model = cls(config)
        fill(model, clip_from_open_clip(load_state(self.checkpoint)), self.checkpoint, ignore=("position_ids",))
        return model


class SiglipReward(ClipScoreReward):
    """score = sigmoid(exp(logit_scale) * cosine + logit_bias): the probability that prompt and picture belong
    together."""

    name = "siglip"
    model_class = "SiglipModel"

    def result(self, cosine: float, truncated: float) -> RewardResult:
        logit = math.exp(self.constant("logit_scale")) * cosine + self.constant("logit_bias")
        probability = 1 / (1 + math.exp(-logit)) if logit >= 0 else math.exp(logit) / (1 + math.exp(logit))
        return RewardResult(probability, {"cosine": cosine, "logit": logit, "truncated": truncated})


@dataclass(eq=False, kw_only=True)
class AestheticReward(ClipScoreReward):
    """score = LAION's aesthetic predictor, about 1 to 10.

    Args:
        path: CLIP ViT-L/14 ("openai/clip-vit-large-patch14")
        head: file of the predictor (.safetensors, or the released sac+logos+ava1-l14-linearMSE.pth)
    """

    name = "aesthetic"
    needs_prompt = False

    head: str

    def load(self) -> None:
        super().load()
        width = int(self._model.config.projection_dim)
        self._head = mlp_head(width)
        state = {k.removeprefix("layers."): v for k, v in load_state(self.head).items()}
        made_for = state["0.weight"].shape[-1] if "0.weight" in state else width
        require(
            made_for == width,
            f"head={self.head!r} was made for embeddings of {made_for}, the CLIP at {self.path!r} has {width}. "
            "Use the CLIP it was trained on (ViT-L/14).",
        )
        fill(self._head, state, self.head)
        self._head.eval().requires_grad_(False).to(self.device)

    def score_batch(self, samples: Sequence[RewardSample]) -> list[RewardResult]:
        hidden = self._model.vision_model(pixel_values=self.pixels(self._images, samples)).pooler_output
        embedding = self._model.visual_projection(hidden).float()
        scores = self._head(embedding / embedding.norm(dim=-1, keepdim=True))[:, 0].tolist()
        return [RewardResult(score, {"aesthetic": score}) for score in scores]


def mlp_head(width: int) -> Any:
    """The head shared by LAION's predictor and ImageReward: linear layers width-1024-128-64-16-1, dropout between."""
    from torch.nn import Dropout, Linear, Sequential

    return Sequential(
        Linear(width, 1024), Dropout(0.2), Linear(1024, 128), Dropout(0.2), Linear(128, 64), Dropout(0.1),
        Linear(64, 16), Linear(16, 1),
    )  # fmt: skip
