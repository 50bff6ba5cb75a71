"""Samples and results as bytes: JSON with PNG pictures, or safetensors. Never pickle.

JSON body          {"samples": [{"image": PNG as base64, or "frames": [PNG, ...], "prompt", "metadata", "uid", "index",
                   "data_source"}]}
safetensors body   uint8 tensors "0", "1", ... of shape [3,H,W] or [T,3,H,W]; __metadata__ {"samples": the JSON list above
                   without pictures}
Answer             {"results": [{"score": number or null, "components", "error", "retryable"}]}

What comes from a socket is checked here field by field, and a picture's size is read from its header before a pixel
of it is decoded.
"""

from __future__ import annotations

import base64
import binascii
import io
import json
import math
import struct
import zlib
from collections.abc import Sequence
from typing import Any, TypeGuard

import numpy as np
from PIL import Image

from image_rewards.base import MAX_PIXELS, MAX_TOTAL_PIXELS, RewardResult, RewardSample, as_number
from image_rewards.errors import RewardInputError, RewardServiceError

JSON_TYPE = "application/json"
TENSOR_TYPE = "application/x-safetensors"
_MAX_HEADER = 16 << 20
_PNG_END = b"IEND\xaeB`\x82"
_MAX_FRAMES = 4096
_FIELDS = {"prompt": str, "metadata": dict, "uid": str, "index": int, "data_source": str}


def encode_png(image: np.ndarray, *, level: int = 1) -> bytes:
    """uint8 [3,H,W] as PNG; level is zlib's (1 fast, 9 small)."""
    buffer = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(image.transpose(1, 2, 0))).save(buffer, "PNG", compress_level=level)
    return buffer.getvalue()


def decode_picture(data: bytes, where: str, formats: Sequence[str] = ("PNG",)) -> np.ndarray:
    """uint8 [3,H,W] of a PNG (or of `formats`). Raises `RewardInputError` on anything else, truncated or too large."""
    try:
        with Image.open(io.BytesIO(data), formats=list(formats)) as picture:
            width, height = picture.size
            if width * height > MAX_PIXELS:
                raise RewardInputError(f"{where}: {height} x {width} pixels are more than the limit of {MAX_PIXELS}.")
            if picture.mode in ("RGBA", "LA", "PA") or "transparency" in picture.info:
                raise RewardInputError(
                    f"{where}: the picture has an alpha channel. Put it on a background first (RGB)."
                )
            if picture.mode not in ("RGB", "L", "P", "1"):
                raise RewardInputError(
                    f"{where}: pictures of mode {picture.mode!r} are not read. Save it as 8-bit RGB."
                )
            pixels = np.asarray(picture.convert("RGB")).transpose(2, 0, 1).copy()
            if picture.format == "PNG" and _PNG_END not in data:  # Pillow forgives a file that lacks its last bytes
                raise RewardInputError(f"{where}: the PNG of {len(data)} bytes has no end: it is truncated.")
            return pixels
    except RewardInputError:
        raise
    except Exception as error:  # Pillow's decoders raise OSError, SyntaxError, ValueError, struct.error, ...
        raise RewardInputError(
            f"{where}: {len(data)} bytes are no readable {' or '.join(formats)} picture "
            f"(truncated, or another format): {type(error).__name__}: {error}"
        ) from error


def _fields(sample: RewardSample) -> dict[str, Any]:
    return {
        "prompt": sample.prompt,
        "metadata": dict(sample.metadata),
        "uid": sample.uid,
        "index": sample.index,
        "data_source": sample.data_source,
    }


def encode_samples(samples: Sequence[RewardSample], content_type: str = JSON_TYPE) -> bytes:
    """A request body. Raises `RewardInputError` where metadata is not JSON."""
    try:
        if content_type == TENSOR_TYPE:
            return _encode_tensors(
                [s.image for s in samples], json.dumps([_fields(s) for s in samples], allow_nan=False)
            )
        rows = []
        for sample in samples:
            frames = sample.image if sample.image.ndim == 4 else sample.image[None]
            packed = [base64.b64encode(encode_png(frame)).decode() for frame in frames]
            rows.append({**_fields(sample), **({"frames": packed} if sample.image.ndim == 4 else {"image": packed[0]})})
        return json.dumps({"samples": rows}, allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise RewardInputError(
            f"metadata cannot be sent as JSON: {error}. Use numbers, texts, lists and dicts."
        ) from error


def decode_samples(body: bytes, content_type: str, max_samples: int) -> list[RewardSample]:
    """The samples of a request body. Raises `RewardInputError` that names the first thing that is wrong."""
    if content_type == TENSOR_TYPE:
        images, rows = _decode_tensors(body)
    elif content_type == JSON_TYPE:
        images, rows = None, _json(body, "the body")
        rows = rows.get("samples") if isinstance(rows, dict) else None
    else:
        raise RewardInputError(f"content type {content_type!r} is not read. Send {JSON_TYPE} or {TENSOR_TYPE}.")
    if not isinstance(rows, list) or not rows:
        raise RewardInputError("the body holds no list 'samples', or an empty one.")
    if len(rows) > max_samples:
        raise RewardInputError(f"{len(rows)} samples are more than the limit of {max_samples} a request. Send fewer.")
    if images is not None and len(images) != len(rows):
        raise RewardInputError(f"{len(images)} tensors came with {len(rows)} samples.")
    return [_sample(row, i, images[i] if images is not None else None) for i, row in enumerate(rows)]


def _json(data: bytes | str, where: str) -> Any:
    try:
        return json.loads(data, parse_constant=lambda word: _refuse(f"{where} holds {word}, which is not JSON."))
    except RewardInputError:
        raise
    except (ValueError, RecursionError) as error:
        raise RewardInputError(f"{where} is not JSON: {type(error).__name__}: {error}") from error


def _refuse(message: str) -> None:
    raise RewardInputError(message)


def _sample(row: Any, number: int, image: np.ndarray | None) -> RewardSample:
    where = f"samples[{number}]"
    if not isinstance(row, dict):
        raise RewardInputError(f"{where} is a {type(row).__name__}, not an object.")
    unknown = sorted(set(row) - {*_FIELDS, "image", "frames"})
    if unknown:
        raise RewardInputError(
            f"{where} has the unknown field {unknown[0]!r}. Fields: image, frames, {', '.join(_FIELDS)}."
        )
    for name, kind in _FIELDS.items():
        if name in row and (not isinstance(row[name], kind) or isinstance(row[name], bool)):
            raise RewardInputError(f"{where}.{name}={row[name]!r:.80} must be of type {kind.__name__}.")
    if image is None:
        if ("image" in row) == ("frames" in row):
            raise RewardInputError(f"{where} needs either 'image' or 'frames'.")
        packed = row["frames"] if "frames" in row else [row["image"]]
        if not isinstance(packed, list) or not packed or len(packed) > _MAX_FRAMES:
            raise RewardInputError(f"{where}.frames must be a list of 1 to {_MAX_FRAMES} pictures.")
        frames: list[np.ndarray] = []
        for i, text in enumerate(packed):
            frames.append(decode_picture(_base64(text, where), f"{where} frame {i}" if "frames" in row else where))
            if frames[-1].shape != frames[0].shape:
                raise RewardInputError(f"{where} frame {i} has shape {frames[-1].shape}, the first {frames[0].shape}.")
            if sum(frame.size for frame in frames) // 3 > MAX_TOTAL_PIXELS:
                raise RewardInputError(f"{where}: more than {MAX_TOTAL_PIXELS} pixels in its frames.")
        image = np.stack(frames) if "frames" in row else frames[0]
    return RewardSample(image, **{name: row[name] for name in _FIELDS if name in row})


def _base64(text: Any, where: str) -> bytes:
    try:
        if not isinstance(text, str):
            raise TypeError(f"a {type(text).__name__}")
        return base64.b64decode(text, validate=True)
    except (binascii.Error, TypeError, ValueError) as error:
        raise RewardInputError(f"{where}: the picture is not base64 text: {error}") from error


def _encode_tensors(images: Sequence[np.ndarray], samples: str) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"samples": samples}}
    offset = 0
    for i, image in enumerate(images):
        header[str(i)] = {"dtype": "U8", "shape": list(image.shape), "data_offsets": [offset, offset + image.size]}
        offset += image.size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + b"".join(np.ascontiguousarray(image).tobytes() for image in images)


def _decode_tensors(body: bytes) -> tuple[list[np.ndarray], Any]:
    if len(body) < 8:
        raise RewardInputError(f"a safetensors body has at least 8 bytes, not {len(body)}.")
    (length,) = struct.unpack("<Q", body[:8])
    if length > min(_MAX_HEADER, len(body) - 8):
        raise RewardInputError(
            f"the safetensors header of {length} bytes does not fit: the body is cut off or damaged."
        )
    header = _json(body[8 : 8 + length], "the safetensors header")
    if not isinstance(header, dict):
        raise RewardInputError("the safetensors header is no object.")
    notes = header.pop("__metadata__", None)
    if not isinstance(notes, dict) or not isinstance(notes.get("samples"), str):
        raise RewardInputError("the safetensors header lacks __metadata__ 'samples'.")
    data = memoryview(body)[8 + length :]
    images, expected = [], 0
    for i in range(len(header)):
        entry = header.get(str(i))
        if not isinstance(entry, dict) or entry.get("dtype") != "U8":
            raise RewardInputError(f"tensor {str(i)!r} is absent or not uint8 ('U8').")
        shape, offsets = entry.get("shape"), entry.get("data_offsets")
        if not (_whole(shape) and _whole(offsets) and len(offsets) == 2) or len(shape) not in (3, 4):
            raise RewardInputError(f"tensor {str(i)!r} has shape {shape!r:.60} and offsets {offsets!r:.60}.")
        begin, end = offsets
        if begin != expected or end - begin != math.prod(shape) or end > len(data):
            raise RewardInputError(f"tensor {str(i)!r}: offsets {offsets!r} do not fit shape {shape!r} or the body.")
        images.append(np.frombuffer(data[begin:end], np.uint8).reshape(shape))
        expected = end
    if expected != len(data):
        raise RewardInputError(f"{len(data) - expected} bytes follow the last tensor.")
    return images, _json(notes["samples"], "__metadata__ 'samples'")


def _whole(values: Any) -> TypeGuard[list[int]]:
    return isinstance(values, list) and all(isinstance(v, int) and not isinstance(v, bool) and v >= 0 for v in values)


def encode_results(results: Sequence[RewardResult]) -> bytes:
    """An answer's body. NaN becomes null."""
    rows = [
        {
            "score": result.score if math.isfinite(result.score) else None,
            "components": {k: (v if math.isfinite(v) else None) for k, v in result.components.items()},
            "error": result.error,
            "retryable": result.retryable,
        }
        for result in results
    ]
    return json.dumps({"results": rows}, allow_nan=False).encode()


def decode_results(body: bytes, expected: int, where: str) -> list[RewardResult]:
    """Exactly `expected` results of an answer. Raises `RewardServiceError` on anything that is not that."""
    try:
        try:
            answer = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"no JSON ({error})") from error
        if not isinstance(answer, dict) or "results" not in answer:
            raise ValueError(f'no {{"results": [...]}}, but {json.dumps(answer, ensure_ascii=False)[:80]}')
        rows = answer["results"]
        if not isinstance(rows, list) or len(rows) != expected:
            raise ValueError(f"{len(rows) if isinstance(rows, list) else 'no list of'} results for {expected} samples")
        return [_result(row) for row in rows]
    except ValueError as error:
        raise RewardServiceError(f"{where} answered with something that is not {expected} scores: {error}") from error


def _result(row: Any) -> RewardResult:
    if not isinstance(row, dict) or not {"score", "components", "error"} <= row.keys():
        raise ValueError(f"each result must be an object with score, components and error, and one is {row!r:.80}")
    error, score, given = row["error"], row["score"], row["components"]
    if not (error is None or isinstance(error, str)) or not isinstance(given, dict):
        raise ValueError(f"error={error!r:.80} must be a text or null, components={given!r:.80} an object")
    if error is not None:
        components = {k: float(v) for k, v in given.items() if isinstance(v, int | float) and abs(v) < 1e300}
        return RewardResult(math.nan, components, error or "it gave no cause", bool(row.get("retryable", False)))
    if isinstance(score, bool):
        raise ValueError(f"score={score!r} without an error")
    try:
        components = {key: as_number(value, key) for key, value in given.items() if value is not None}
        return RewardResult(as_number(score, "score"), components)
    except ValueError as wrong:
        raise ValueError(f"{wrong}, without an error") from wrong


def decompress(body: bytes, encoding: str, limit: int) -> bytes:
    """The body behind a Content-Encoding of gzip or deflate, at most `limit` bytes of it.

    Raises:
        ValueError: another encoding, a damaged or cut-off body, or more bytes than `limit`.
    """
    kind = encoding.strip().lower()
    if kind in ("", "identity"):
        return body
    windows = {"gzip": [31], "x-gzip": [31], "deflate": [15, -15]}.get(kind)  # deflate: with zlib's frame, or bare
    if windows is None:
        raise ValueError(f"Content-Encoding {encoding!r} is not read; send gzip, deflate or none")
    for window in windows:
        unpacker = zlib.decompressobj(window)
        try:
            unpacked = unpacker.decompress(body, limit + 1)
        except zlib.error as error:
            if window == windows[-1]:
                raise ValueError(f"the {kind} body of {len(body)} bytes is damaged: {error}") from error
            continue
        if len(unpacked) > limit:
            raise ValueError(f"the {kind} body holds more than {limit} bytes")
        if not unpacker.eof:
            raise ValueError(f"the {kind} body of {len(body)} bytes is cut off")
        return unpacked
    raise AssertionError("unreachable")
