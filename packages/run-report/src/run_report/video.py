"""Videos as mp4 files (H.264), which browsers play. Needs the extra `video` (PyAV)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from .errors import ReportError

FRAMES_PER_S = 16
"""Frames themselves have no rate; this is the one that Wan2.1 plays at."""


def write_video(file: str | os.PathLike[str], frames: np.ndarray, frames_per_s: int = FRAMES_PER_S) -> None:
    """Write uint8 [T, C, H, W], C = 1 or 3; an odd side gets one more row or column, which this kind of file needs.

    Raises:
        ReportError: the extra is not installed.
    """
    av = _av()
    pixels = np.repeat(frames, 3, axis=1) if frames.shape[1] == 1 else frames
    pixels = np.pad(pixels, ((0, 0), (0, 0), (0, pixels.shape[2] % 2), (0, pixels.shape[3] % 2)), mode="edge")
    with av.open(str(file), "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=frames_per_s, options={"crf": "18"})
        stream.height, stream.width, stream.pix_fmt = pixels.shape[2], pixels.shape[3], "yuv420p"
        for picture in pixels:
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(picture.transpose(1, 2, 0)), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())


def read_video(file: str | os.PathLike[str], count: int) -> np.ndarray:
    """The first `count` frames, uint8 [T, 3, H, W].

    Raises:
        ReportError: the extra is not installed.
        ValueError: the file is no video, or has fewer frames.
    """
    frames = []
    with _opened(file) as container:
        for frame in container.decode(video=0):
            frames.append(frame.to_ndarray(format="rgb24").transpose(2, 0, 1))
            if len(frames) == count:
                return np.stack(frames)
    raise ValueError(f"it has {len(frames)} frames, and {count} are needed")


def video_size(file: str | os.PathLike[str]) -> tuple[int, int, int]:
    """(width, height, frames); raises as `read_video` does."""
    with _opened(file) as container:
        stream = container.streams.video[0]
        count = stream.frames or sum(1 for _ in container.decode(video=0))
        return stream.width, stream.height, count


def _opened(file: str | os.PathLike[str]) -> Any:
    av = _av()
    try:
        container = av.open(str(Path(file)))
    except av.FFmpegError as error:
        raise ValueError(f"it is no video: {error}") from error
    if not container.streams.video:
        raise ValueError("it holds no video")
    return container


def _av() -> Any:
    try:
        import av
    except ImportError as error:
        raise ReportError(
            "video files need PyAV: uv run --extra video …, or pip install './packages/run-report[video]'"
        ) from error
    return av
