"""Finished pictures that come with the prompts: what offline DPO and supervised fine-tuning train on.

A line of `data.train_file` names them, by paths inside its own folder: `chosen` and `rejected` for a loss on pairs, `image` (or
`file_name`, as the `datasets` library's image folders call it) for one that imitates. Each is a picture, for a model of videos a
video file, or `.safetensors` with one tensor of clean latents, as the model holds them. They are encoded when their step comes,
and remembered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .errors import TrainerError

if TYPE_CHECKING:
    from model_specs.base import ModelSpec
    from torch import Tensor

    from .config import RunConfig
    from .prompts import Prompt

PAIR, ONE = (("chosen",), ("rejected",)), (("image", "file_name"),)
"""Fields of a line, each with the names that it may have."""
PICTURES = ("PNG", "JPEG", "WEBP")
"""Kinds that are opened, as PIL calls them: readers of others start programs or are seldom looked after."""
LATENTS, VIDEOS = ".safetensors", (".mp4", ".mov", ".mkv", ".webm")
CACHE = 2 * 1024**3
"""Bytes of latents that a worker remembers: about 8,000 pictures of 512 pixels of a model with 16 latent channels."""
SHOWN = 3
"""Bad lines that one message names."""


def finished_files(prompt: Prompt, paired: bool) -> list[Path]:
    """The files that a prompt names: winner and loser, or one.

    Raises:
        TrainerError: a field that is missing or no text, or a path that leaves the folder of the prompt file.
    """
    files = []
    for names in PAIR if paired else ONE:
        value = next((prompt.metadata[name] for name in names if name in prompt.metadata), None)
        if not isinstance(value, str) or not value:
            wanted = '"chosen" and "rejected"' if paired else '"image"'
            raise TrainerError(
                f"{prompt.where} needs {wanted}, each the path of a picture, and has {value!r} for {names[0]!r}"
            )
        file = (prompt.folder / value).absolute()
        if not file.resolve().is_relative_to(prompt.folder.resolve()):
            raise TrainerError(f"{prompt.where}: {names[0]}={value!r} lies outside of {prompt.folder}; move it there")
        files.append(file)
    return files


def check_given(config: RunConfig, spec: ModelSpec, prompts: Sequence[Prompt]) -> None:
    """Look at every file that the prompts name: it is there, can be read, and has the size that is trained.

    Raises:
        TrainerError: names the first lines that cannot be used, and how many there are.
    """
    wrong = []
    for prompt in prompts:
        try:
            for file in finished_files(prompt, config.actor.diffusion_loss.spec.paired):
                fault = _fault(config, spec, file)
                if fault:
                    raise TrainerError(f"{prompt.where}: {file} {fault}")
        except TrainerError as error:
            wrong.append(str(error))
    if wrong:
        more = f"; and {len(wrong) - SHOWN} more lines" if len(wrong) > SHOWN else ""
        raise TrainerError(f"data.offline=true: {'; '.join(wrong[:SHOWN])}{more}")


def _fault(config: RunConfig, spec: ModelSpec, file: Path) -> str:
    """What is wrong with a file; empty when nothing is. Pictures are not decoded here, only their headers and checksums are."""
    from PIL import Image

    drawn = config.rollout.pipeline
    if not file.is_file():
        return "is not there"
    size, frames = (drawn.width, drawn.height), drawn.num_frames
    keys = "rollout.pipeline.width and height"
    try:
        if file.suffix.lower() == LATENTS:
            found, wanted = _latent_shape(file), spec.latent_shape(drawn.height, drawn.width, frames)
            return "" if found == wanted else f"holds latents {found}, and {keys} and this model need {wanted}"
        if file.suffix.lower() in VIDEOS:
            if frames == 1:
                return "is a video, and rollout.pipeline.num_frames is 1"
            *here, count = _video_size(file)
            ok = tuple(here) == size and count >= frames
            return (
                ""
                if ok
                else f"has {here[0]}x{here[1]} pixels and {count} frames; make it {size[0]}x{size[1]} with {frames}"
            )
        if frames > 1:
            return (
                f"is a picture, and rollout.pipeline.num_frames={frames} needs a video ({', '.join(VIDEOS)}) or latents"
            )
        with Image.open(file, formats=PICTURES) as picture:
            found_size = picture.size
            picture.verify()
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        return f"cannot be read: {error}"
    if found_size != size:
        return (
            f"has {found_size[0]}x{found_size[1]} pixels, and {keys} are {size[0]}x{size[1]}; resize it, or change them"
        )
    return ""


class Finished:
    """Clean latents of files, each encoded once; those beyond `CACHE` bytes are encoded again at every use.

    Args:
        frames: of a sample.
        encode: pixels of some samples to their clean latents.
    """

    def __init__(self, frames: int, encode: Callable[[Sequence[Tensor]], list[Tensor]]):
        self.frames, self.encode = frames, encode
        self._known: dict[str, Tensor] = {}
        self._bytes = 0

    def latents(self, files: Sequence[str]) -> list[Tensor]:
        """[...] fp32 of each file."""
        found = {file: self._known[file] for file in files if file in self._known}
        read = {file: read_finished(Path(file), self.frames) for file in dict.fromkeys(files) if file not in found}
        found |= {file: value for file, value in read.items() if value.is_floating_point()}
        pictures = {file: value for file, value in read.items() if not value.is_floating_point()}
        if pictures:
            found |= dict(zip(pictures, self.encode(list(pictures.values())), strict=True))
        for file in read:
            size = found[file].nbytes
            if self._bytes + size <= CACHE:
                self._known[file], self._bytes = found[file].clone(), self._bytes + size
        return [found[file] for file in files]


def read_finished(file: Path, frames: int = 1) -> Tensor:
    """Pixels uint8 [3, H, W], or [T, 3, H, W] of the first `frames` of a video, or clean latents of a file in fp32.

    Raises:
        TrainerError: the file cannot be read (any more).
    """
    import numpy as np
    import torch
    from PIL import Image

    try:
        if file.suffix.lower() == LATENTS:
            from safetensors.torch import load_file

            return next(iter(load_file(file).values())).float()
        if file.suffix.lower() in VIDEOS:
            from run_report.video import read_video

            return torch.from_numpy(read_video(file, frames))
        with Image.open(file, formats=PICTURES) as picture:
            return torch.from_numpy(np.array(picture.convert("RGB")).transpose(2, 0, 1).copy())
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise TrainerError(f"{file} cannot be read: {error}") from error


def _latent_shape(file: Path) -> tuple[int, ...]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, "numpy") as tensors:
            names = list(tensors.keys())
            if len(names) != 1:
                raise ValueError(f"it holds {len(names)} tensors, and one is expected")
            return tuple(tensors.get_slice(names[0]).get_shape())
    except SafetensorError as error:
        raise ValueError(str(error)) from error


def _video_size(file: Path) -> tuple[int, int, int]:
    from run_report.video import video_size

    return video_size(file)
