"""`geneval`: GenEval's questions (see `scene_rules`), answered by an object detector and, for colours, a CLIP.

The original uses a Mask2Former and reads colours inside its masks. This one takes any transformers detector with boxes (DETR,
RT-DETR, YOLOS) and reads colours inside the box. Compare its numbers with each other, not with published tables.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from .base import RewardResult, RewardSample, check_weights
from .errors import RewardTargetError, require
from .model import ModelReward, from_pretrained, processor_of
from .scene_rules import Found, judge, parse_questions

COLORS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white")
# One thing, several names: GenEval's files say the first, COCO detectors one of the others.
SYNONYMS = (
    ("computer mouse", "mouse"),
    ("tv remote", "remote"),
    ("computer keyboard", "keyboard"),
    ("motorcycle", "motorbike"),
    ("airplane", "aeroplane"),
    ("couch", "sofa"),
    ("potted plant", "pottedplant"),
    ("dining table", "diningtable"),
    ("tv", "tvmonitor"),
)


@dataclass(eq=False, kw_only=True)
class GenevalReward(ModelReward):
    """score = strict_weight * strict + parts_weight * parts, from metadata include and exclude.

    Args:
        detector: folder or hub id of a transformers object detector, e.g. "facebook/detr-resnet-50"
        clip: folder or hub id of a CLIP that tells colours; needed only where questions name colours
        threshold: least confidence of an object
        counting_threshold: the same in pictures whose questions use exclude, as GenEval does for counting
        overlap: of two boxes of one class with more intersection over union than this, the less confident goes
    """

    name = "geneval"

    detector: str
    clip: str | None = None
    strict_weight: float = 0.5
    parts_weight: float = 0.5
    threshold: float = 0.3
    counting_threshold: float = 0.9
    overlap: float = 0.7
    batch_size: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        check_weights(strict_weight=self.strict_weight, parts_weight=self.parts_weight)
        for name in ("threshold", "counting_threshold", "overlap"):
            value = getattr(self, name)
            require(0 <= value <= 1, f"{name}={value!r} must be between 0 and 1.")

    def check_target(self, prompt: str, metadata: Mapping[str, Any]) -> None:
        self.prepare()
        parse_questions(in_words_of(self._names, metadata), self._names, COLORS)
        asks_color = any(
            row.get("color") is not None for key in ("include", "exclude") for row in metadata.get(key) or ()
        )
        wrong = f"geneval: {dict(metadata)!r} asks for a colour, and no clip= is set to tell colours."
        require(not asks_color or self.clip is not None, wrong, RewardTargetError)

    def target_of(self, prompt: str, metadata: Mapping[str, Any]) -> Any:
        return {key: metadata[key] for key in ("include", "exclude") if metadata.get(key)}

    def load(self) -> None:
        import transformers

        auto = transformers.AutoModelForObjectDetection
        self._model = self.place(from_pretrained(auto, self.detector, self.revision, allowed_missing=("position_ids",)))
        self._images = processor_of(transformers.AutoImageProcessor, self.detector, self.revision)
        self._names = frozenset(str(name) for name in self._model.config.id2label.values())
        if self.clip is not None:
            clip = from_pretrained(transformers.CLIPModel, self.clip, None, allowed_missing=("position_ids",))
            self._clip = self.place(clip)
            self._clip_images = processor_of(transformers.AutoImageProcessor, self.clip, None)
            self._clip_tokens = processor_of(transformers.AutoTokenizer, self.clip, None)

    def score_valid(self, samples: Sequence[RewardSample]) -> list[RewardResult]:
        # Detectors pad a batch to its largest picture, so pictures go one by one.
        with self.awake():
            return [self.score_batch([sample])[0] for sample in samples]

    def score_batch(self, samples: Sequence[RewardSample]) -> list[RewardResult]:
        sample = samples[0]
        questions = parse_questions(in_words_of(self._names, sample.metadata), self._names, COLORS)
        found = self.detect(sample.image, self.counting_threshold if questions.exclude else self.threshold)
        asked = {a.name for a in (*questions.include, *questions.exclude) if a.color is not None}
        if asked:
            found = [self.with_color(f, sample.image) if f.name in asked else f for f in found]
        components = judge(found, questions)
        score = self.strict_weight * components["strict"] + self.parts_weight * components["parts"]
        return [RewardResult(score, {**components, "objects": float(len(found))})]

    def detect(self, image: np.ndarray, threshold: float) -> list[Found]:
        """Objects of uint8 [3,H,W], the most confident first, without doubles."""
        import torch

        inputs = self._images(
            images=np.ascontiguousarray(image), return_tensors="pt", input_data_format="channels_first"
        ).to(self.device)
        if "pixel_values" in inputs:
            inputs["pixel_values"] = inputs["pixel_values"].to(getattr(torch, self.dtype))
        outputs = self._model(**inputs)
        rows = self._images.post_process_object_detection(outputs, threshold, target_sizes=[image.shape[1:]])[0]
        names = self._model.config.id2label
        found = [
            Found(str(names[int(label)]), tuple(map(float, box)), float(score))  # type: ignore[arg-type]
            for score, label, box in zip(rows["scores"], rows["labels"], rows["boxes"].float(), strict=True)
        ]
        return without_doubles(found, self.overlap)

    def with_color(self, found: Found, image: np.ndarray) -> Found:
        """`found` with the colour that CLIP finds nearest to the cut-out box."""
        left, top, right, bottom = (round(v) for v in found.box)
        height, width = image.shape[1:]
        left, top = min(max(left, 0), width - 1), min(max(top, 0), height - 1)
        crop = image[:, top : max(bottom, top + 1), left : max(right, left + 1)]
        texts = [f"a photo of a {color} {found.name}" for color in COLORS]
        length = int(self._clip.config.text_config.max_position_embeddings)
        tokens = self._clip_tokens(texts, padding="max_length", truncation=True, max_length=length, return_tensors="pt")
        pixels = self.pixels(self._clip_images, [RewardSample(crop)])
        out = self._clip(
            pixel_values=pixels, **{k: v.to(self.device) for k, v in tokens.items() if k != "token_type_ids"}
        )
        return replace(found, color=COLORS[int(out.logits_per_image[0].argmax())])


def in_words_of(names: Container[str], metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The metadata with classes that a detector does not know by that word in a word of its own, where it has one."""

    def word(name: Any) -> Any:
        if not isinstance(name, str) or name in names:
            return name
        return next((w for group in SYNONYMS if name in group for w in group if w in names), name)

    def rows(given: Any) -> Any:
        if not isinstance(given, list | tuple):
            return given
        return [
            {**row, "class": word(row["class"])} if isinstance(row, Mapping) and "class" in row else row
            for row in given
        ]

    return {key: rows(value) if key in ("include", "exclude") else value for key, value in metadata.items()}


def without_doubles(found: Sequence[Found], overlap: float) -> list[Found]:
    """Greedy non-maximum suppression within each class, the most confident first."""
    kept: list[Found] = []
    for candidate in sorted(found, key=lambda f: -f.confidence):
        if all(other.name != candidate.name or _iou(other.box, candidate.box) <= overlap for other in kept):
            kept.append(candidate)
    return kept


def _iou(a: Sequence[float], b: Sequence[float]) -> float:
    width = min(a[2], b[2]) - max(a[0], b[0])
    height = min(a[3], b[3]) - max(a[1], b[1])
    shared = max(0.0, width) * max(0.0, height)
    total = sum((x[2] - x[0]) * (x[3] - x[1]) for x in (a, b)) - shared
    return shared / total if total > 0 else 0.0
