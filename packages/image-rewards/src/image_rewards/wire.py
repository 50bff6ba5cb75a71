"""Samples and results as bytes: JSON with PNG pictures, or safetensors. Never pickle.

JSON body          {"samples": [{"image": PNG as base64, or "frames": [PNG, ...], "prompt", "metadata", "uid", "index"}]}
safetensors body   uint8 tensors "0", "1", ... of shape [3,H,W] or [T,3,H,W]; __metadata__ {"samples": the JSON list above
                   without pictures}
Answer             {"results": [{"score": number or null, "components", "error", "retryable"}]}

Every field that comes from a socket is checked, and a picture's size is read from its header before it is decoded.
"""

from __future__ import annotations

import base64
import binascii
import io
import json
import math
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy
from PIL import Image

from .base import MAX_PIXELS, MAX_TOTAL_PIXELS, RewardResult, RewardSample, as_number
from .errors import RewardInputError, RewardServiceError, require

JSON_TYPE = "application/json"
TENSOR_TYPE = "application/x-safetensors"
_PNG_END = b"IEND\xaeB`\x82"
_MAX_FRAMES = 4096
_FIELDS = {"prompt": str, "metadata": dict, "uid": str, "index": int}


def _must(holds: bool, message: str) -> None:
    require(holds, message, RewardInputError)


def encode_png(image: np.ndarray, *, level: int = 1) -> bytes:
    """uint8 [3,H,W] as PNG; level is zlib's (1 fast, 9 small)."""
    buffer = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(image.transpose(1, 2, 0))).save(buffer, "PNG", compress_level=level)
    return buffer.getvalue()


def decode_picture(data: bytes, where: str, formats: Sequence[str] = ("PNG",)) -> np.ndarray:
    """uint8 [3,H,W] of a PNG (or of `formats`). Raises `RewardInputError` on anything else, truncated or too large."""
    try:
        with Image.open(io.BytesIO(data), formats=list(formats)) as picture:
            (width, height), mode = picture.size, picture.mode
            large = f"{where}: {height} x {width} pixels are more than the limit of {MAX_PIXELS}."
            _must(width * height <= MAX_PIXELS, large)
            alpha = mode in ("RGBA", "LA", "PA") or "transparency" in picture.info
            _must(not alpha, f"{where}: the picture has an alpha channel. Put it on a background first (RGB).")
            read = mode in ("RGB", "L", "P", "1")
            _must(read, f"{where}: pictures of mode {mode!r} are not read. Save it as 8-bit RGB.")
            pixels = np.asarray(picture.convert("RGB")).transpose(2, 0, 1).copy()
            whole = picture.format != "PNG" or _PNG_END in data  # Pillow forgives a file that lacks its last bytes
            _must(whole, f"{where}: the PNG of {len(data)} bytes has no end: it is truncated.")
            return pixels
    except RewardInputError:
        raise
    except Exception as error:  # Pillow's decoders raise OSError, SyntaxError, ValueError, struct.error, ...
        raise RewardInputError(
            f"{where}: {len(data)} bytes are no readable {' or '.join(formats)} picture "
            f"(truncated, or another format): {type(error).__name__}: {error}"
        ) from error


def encode_samples(samples: Sequence[RewardSample], content_type: str = JSON_TYPE) -> bytes:
    """A request body. Raises `RewardInputError` where metadata is not JSON."""
    rows = [{name: getattr(sample, name) for name in _FIELDS} for sample in samples]
    if content_type == JSON_TYPE:
        for row, sample in zip(rows, samples, strict=True):
            video = sample.image.ndim == 4
            frames = sample.image if video else sample.image[None]
            packed = [base64.b64encode(encode_png(frame)).decode() for frame in frames]
            row.update({"frames": packed} if video else {"image": packed[0]})
    try:
        text = json.dumps(rows, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise RewardInputError(
            f"metadata cannot be sent as JSON: {error}. Use numbers, texts, lists and dicts."
        ) from error
    if content_type == JSON_TYPE:
        return f'{{"samples": {text}}}'.encode()
    tensors = {str(i): np.ascontiguousarray(sample.image) for i, sample in enumerate(samples)}
    return safetensors.numpy.save(tensors, {"samples": text})


def decode_samples(body: bytes, content_type: str, max_samples: int) -> list[RewardSample]:
    """The samples of a request body. Raises `RewardInputError` that names the first thing that is wrong."""
    if content_type == TENSOR_TYPE:
        images, rows = _decode_tensors(body)
    elif content_type == JSON_TYPE:
        images, rows = None, _json(body, "the body")
        rows = rows.get("samples") if isinstance(rows, dict) else None
    else:
        raise RewardInputError(f"content type {content_type!r} is not read. Send {JSON_TYPE} or {TENSOR_TYPE}.")
    _must(isinstance(rows, list) and bool(rows), "the body holds no list 'samples', or an empty one.")
    many = f"{len(rows)} samples are more than the limit of {max_samples} a request. Send fewer."
    _must(len(rows) <= max_samples, many)
    return [_sample(row, i, images) for i, row in enumerate(rows)]


def _json(data: bytes | str, where: str) -> Any:
    try:
        return json.loads(data, parse_constant=lambda word: _must(False, f"{where} holds {word}, which is not JSON."))
    except RewardInputError:
        raise
    except (ValueError, RecursionError) as error:
        raise RewardInputError(f"{where} is not JSON: {type(error).__name__}: {error}") from error


def _sample(row: Any, number: int, images: dict[str, np.ndarray] | None) -> RewardSample:
    where = f"samples[{number}]"
    _must(isinstance(row, dict), f"{where} is a {type(row).__name__}, not an object.")
    known = ("image", "frames", *_FIELDS)
    for name in sorted(row):
        _must(name in known, f"{where} has the unknown field {name!r}. Fields: {', '.join(known)}.")
        kind = _FIELDS.get(name, object)
        fits = isinstance(row[name], kind) and (name not in _FIELDS or not isinstance(row[name], bool))
        _must(fits, f"{where}.{name}={row[name]!r:.80} must be of type {kind.__name__}.")
    if images is None:
        image = _pictures(row, where)
    else:
        _must(str(number) in images, f"{where} has no tensor {str(number)!r}.")
        image = images[str(number)]
    return RewardSample(image, **{name: row[name] for name in _FIELDS if name in row})


def _pictures(row: dict[str, Any], where: str) -> np.ndarray:
    """[3,H,W] of "image", or [T,3,H,W] of "frames"."""
    _must(("image" in row) != ("frames" in row), f"{where} needs either 'image' or 'frames'.")
    packed = row["frames"] if "frames" in row else [row["image"]]
    listed = isinstance(packed, list) and 0 < len(packed) <= _MAX_FRAMES
    _must(listed, f"{where}.frames must be a list of 1 to {_MAX_FRAMES} pictures.")
    frames: list[np.ndarray] = []
    for i, text in enumerate(packed):
        frames.append(decode_picture(_base64(text, where), f"{where} frame {i}" if "frames" in row else where))
        shape, first = frames[-1].shape, frames[0].shape
        _must(shape == first, f"{where} frame {i} has shape {shape}, the first {first}.")
        pixels = sum(frame.size for frame in frames) // 3
        _must(pixels <= MAX_TOTAL_PIXELS, f"{where}: more than {MAX_TOTAL_PIXELS} pixels in its frames.")
    return np.stack(frames) if "frames" in row else frames[0]


def _base64(text: Any, where: str) -> bytes:
    try:
        if not isinstance(text, str):
            raise TypeError(f"a {type(text).__name__}")
        return base64.b64decode(text, validate=True)
    except (binascii.Error, TypeError, ValueError) as error:
        raise RewardInputError(f"{where}: the picture is not base64 text: {error}") from error


def _decode_tensors(body: bytes) -> tuple[dict[str, np.ndarray], Any]:
    """Tensors by name, and the list of samples."""
    try:
        entries = safetensors.deserialize(body)
        header = json.loads(body[8 : 8 + int.from_bytes(body[:8], "little")])
        text = header["__metadata__"]["samples"]
    except (safetensors.SafetensorError, KeyError, TypeError) as error:
        raise RewardInputError(
            f"the body is no safetensors file with __metadata__ 'samples': it is cut off or damaged ({error!r})"
        ) from error
    images = {}
    for name, entry in entries:
        if entry["dtype"] != "U8":
            raise RewardInputError(f"tensor {name!r} is not uint8 ('U8').")
        images[name] = np.frombuffer(entry["data"], np.uint8).reshape(entry["shape"])
    return images, _json(text, "__metadata__ 'samples'")


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
