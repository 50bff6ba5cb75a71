"""`ocr`: is the text that was asked for in the picture, read by a real OCR engine?

The engine is RapidOCR (PP-OCRv6 small through onnxruntime); its models ship in its package, so nothing is downloaded.
It has symbols for Latin, Greek, Chinese and Japanese; `check_target` refuses a target with other letters. A policy that
is rewarded for text alone learns to erase the rest, so the guards of `quality.py` are always among the components.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from .base import PerSampleReward, RewardResult, RewardSample, check_weights
from .errors import RewardTargetError, missing_extra, require
from .quality import quality_components
from .text import match_texts, normalize, targets_of

MIN_LEGIBLE = 6  # pixels; no letter fits into less
MAX_ASPECT = 4
STROKES = frozenset("Iil|!/\\-_.,:;'`\"·一ー丨")  # a target of one or two of these alone is read right by chance only


@dataclass(frozen=True)
class ReadLine:
    """One line as read: its text, the engine's confidence in [0, 1], and its box (left, top, right, bottom) in
    pixels of the picture as the engine saw it."""

    text: str
    confidence: float
    box: tuple[float, float, float, float]


@dataclass(eq=False)
class OcrReward(PerSampleReward):
    """score = exact_weight * exact + edit_weight * edit.

    Targets come from metadata["text"] (a string or a list) or, without it, from the quoted parts of the prompt; see
    `text.targets_of`.

    Args:
        ignore_case: compare without case (default)
        min_side: smaller pictures are enlarged to this shorter side for the detector
        max_side: larger pictures are reduced to this longer side first; more is slower and finds smaller letters

    Components: exact, edit, extra (share of read letters that nobody asked for), confidence (of the engine, 0 where
    nothing was read), lines, and sharpness, contrast, blank.
    """

    name = "ocr"

    exact_weight: float = 0.5
    edit_weight: float = 0.5
    ignore_case: bool = True
    min_side: int = 96
    max_side: int = 736

    def __post_init__(self) -> None:
        check_weights(exact_weight=self.exact_weight, edit_weight=self.edit_weight)
        low, high = self.min_side, self.max_side
        require(32 <= low <= high, f"min_side={low!r}, max_side={high!r}: need 32 <= min_side <= max_side.")
        self._engine = RapidOcrEngine(low, high)

    def target_of(self, prompt: str, metadata: Mapping[str, Any]) -> list[str]:
        return targets_of(prompt, metadata, ignore_case=self.ignore_case)

    def check_target(self, prompt: str, metadata: Mapping[str, Any]) -> None:
        for text in self.target_of(prompt, metadata):
            letters = normalize(text, ignore_case=False)
            bare = len(letters) == 1 or (len(letters) == 2 and not letters.isupper())
            require(
                not (bare and set(letters) <= STROKES),
                f"ocr: the engine cannot tell I, l, 1, !, | and dashes apart with no other letter beside them, so right "
                f"pictures of the target {text!r} would score 0. Use a longer text, or the 'vlm' reward.",
                RewardTargetError,
            )
            unknown = self._engine.unreadable(text)
            require(
                not unknown,
                f"ocr: the engine cannot read {', '.join(map(repr, unknown))} in the target {text!r}, "
                "so no picture could ever be right. Use another text, or the 'vlm' reward.",
                RewardTargetError,
            )

    def score_one(self, sample: RewardSample) -> RewardResult:
        lines = self._engine.read(sample.image)
        words = [word for line in lines for word in re.split(r"\s+", line.text)]
        targets = self.target_of(sample.prompt, sample.metadata)
        match = match_texts(targets, words, ignore_case=self.ignore_case)
        components = {
            "exact": match.exact,
            "edit": match.edit,
            "extra": match.extra,
            "confidence": float(np.mean([line.confidence for line in lines])) if lines else 0.0,
            "lines": float(len(lines)),
            **quality_components(sample.image),
        }
        return RewardResult(self.exact_weight * match.exact + self.edit_weight * match.edit, components)


class RapidOcrEngine:
    """RapidOCR with one thread (workers are the parallelism, and results cannot depend on thread count). Loads on
    first use."""

    def __init__(self, min_side: int, max_side: int) -> None:
        self.min_side, self.max_side = min_side, max_side
        self._lock = threading.Lock()
        self._loaded: Any = None
        self._alphabet: frozenset[str] = frozenset()

    def __getstate__(self) -> dict[str, Any]:
        return {"min_side": self.min_side, "max_side": self.max_side}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def _load(self) -> Any:
        with self._lock:
            if self._loaded is None:
                try:
                    from rapidocr import RapidOCR
                except ImportError as error:
                    raise missing_extra("rapidocr", "ocr", "the reward 'ocr'") from error
                engine = RapidOCR(
                    params={
                        "Global.log_level": "error",
                        "Global.use_cls": False,  # generated text stands upright
                        "Det.limit_side_len": self.min_side,
                        "Det.limit_type": "min",
                        "EngineConfig.onnxruntime.intra_op_num_threads": 1,
                        "EngineConfig.onnxruntime.inter_op_num_threads": 1,
                    }
                )
                _read_both_ways(engine)
                engine(np.full((64, 64, 3), 255, np.uint8))  # loads the detector
                symbols = engine._load_rec_model().postprocess_op.character
                self._alphabet = frozenset(c for symbol in symbols if symbol != "blank" for c in normalize(symbol))
                self._loaded = engine
            return self._loaded

    def unreadable(self, text: str) -> list[str]:
        """Letters of `text` that the engine has no symbol for."""
        self._load()
        return sorted(set(normalize(text)) - self._alphabet)

    def read(self, image: np.ndarray) -> list[ReadLine]:
        """Lines of `image`, uint8 [3,H,W], from top to bottom and left to right."""
        if min(image.shape[1:]) < MIN_LEGIBLE:
            return []
        engine = self._load()
        picture = _fit(image, self.max_side)
        with self._lock:  # the engine keeps per-call settings in itself
            found = engine(np.ascontiguousarray(picture[..., ::-1]))  # RGB to BGR
        if found.txts is None or found.boxes is None:
            return []
        lines = []
        for text, confidence, corners in zip(found.txts, found.scores, np.asarray(found.boxes), strict=True):
            (left, top), (right, bottom) = corners.min(axis=0), corners.max(axis=0)
            lines.append(ReadLine(text, float(confidence), (float(left), float(top), float(right), float(bottom))))
        return reading_order(lines)


def _read_both_ways(engine: Any) -> None:
    """Let `engine` read narrow crops upright as well, and keep the reading of which it is more confident.

    The engine turns every crop that is 1.5 times higher than wide, as if its text ran from top to bottom. A single I, l, i or !
    then lies on its side and is read as a dash.
    """
    crop, recognize = engine.crop_text_regions, engine.recognize_txt
    turned: list[int] = []

    def crop_text_regions(image: np.ndarray, boxes: np.ndarray) -> list[np.ndarray]:
        crops: list[np.ndarray] = crop(image, boxes)
        sides = [(max(_length(b, 0, 1), _length(b, 2, 3)), max(_length(b, 0, 3), _length(b, 1, 2))) for b in boxes]
        turned[:] = [i for i, (width, height) in enumerate(sides) if int(height) >= 1.5 * int(width)]
        return crops

    def recognize_txt(crops: list[np.ndarray]) -> Any:
        read = recognize(crops)
        if not turned or read.txts is None:
            return read
        upright = recognize([np.ascontiguousarray(np.rot90(crops[i], -1)) for i in turned])
        texts, scores = list(read.txts), list(read.scores)
        for i, text, score in zip(turned, upright.txts or (), upright.scores or (), strict=False):
            if text.strip() and (score > scores[i] or not texts[i].strip()):
                texts[i], scores[i] = text, score
        read.txts, read.scores = tuple(texts), tuple(scores)
        return read

    engine.crop_text_regions, engine.recognize_txt = crop_text_regions, recognize_txt


def _length(box: np.ndarray, a: int, b: int) -> float:
    return float(np.linalg.norm(box[a] - box[b]))


def _fit(image: np.ndarray, max_side: int) -> np.ndarray:
    """uint8 [3,H,W] to [h,w,3] with the longer side at most `max_side`, and at most four times the shorter side.

    The engine enlarges by the shorter side, so a picture of one by thousands of pixels would become very large.
    """
    picture = np.ascontiguousarray(image.transpose(1, 2, 0))
    height, width = picture.shape[:2]
    longest = max(height, width)
    if longest > max_side:
        height, width = (max(1, round(side * max_side / longest)) for side in (height, width))
        picture = np.asarray(Image.fromarray(picture).resize((width, height), Image.Resampling.LANCZOS))
    least = -(-max(height, width) // MAX_ASPECT)
    return np.pad(picture, ((0, max(0, least - height)), (0, max(0, least - width)), (0, 0)), mode="edge")


def reading_order(lines: list[ReadLine]) -> list[ReadLine]:
    """Sort by rows: a line belongs to the row above when its middle lies within that row's first line."""
    rows: list[list[ReadLine]] = []
    for line in sorted(lines, key=lambda x: (x.box[1] + x.box[3], x.box[0])):
        middle = (line.box[1] + line.box[3]) / 2
        if rows and rows[-1][0].box[1] <= middle <= rows[-1][0].box[3]:
            rows[-1].append(line)
        else:
            rows.append([line])
    return [line for row in rows for line in sorted(row, key=lambda x: x.box[0])]
