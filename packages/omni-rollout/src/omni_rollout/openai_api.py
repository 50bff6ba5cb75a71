"""`POST /v1/images/generations` in OpenAI's form, for people who want to look at the policy that samples now.

Rollouts do not come through here: they need trajectories, which this route does not carry.
"""

from __future__ import annotations

import asyncio
import base64
import io
import itertools
import json
import re
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

from sde_samplers.settings import SamplerSettings

from .config import DiffusionPipelineConfig
from .errors import MissingExtraError, RolloutConfigError, RolloutError
from .types import GenerationRequest

if TYPE_CHECKING:
    from tensordict import TensorDict

_INSTALL = "uv run --extra server …, or uv pip install './packages/omni-rollout[http]'"
Draw = Callable[[Sequence[GenerationRequest]], Awaitable["TensorDict"]]

_FIELDS = (
    "prompt", "n", "size", "seed", "negative_prompt", "num_inference_steps", "true_cfg_scale", "guidance_scale", "adapter",
    "model", "response_format", "user", "stream", "output_format",
)  # fmt: skip
_IGNORED = ("quality", "style", "background", "moderation", "output_compression", "partial_images", "input_fidelity")
"""What OpenAI's own clients send for models of theirs. It has no meaning here; the answer names those that were left out."""
_MAX_BODY = 1 << 20
_MAX_IMAGES = 16
_MAX_SIDE = 4096
_MULTIPLE = 16
"""Sides of a picture are multiples of this: latent cells of 8 pixels, in patches of 2, in every architecture of model_specs."""


def create_app(draw: Draw, pipeline: DiffusionPipelineConfig, model: str = "policy") -> Any:
    """A FastAPI application.

    Args:
        draw: gives the samples of some requests, as a backend's `generate` does.
        pipeline: defaults for what a request leaves out.
        model: name shown under `/v1/models`.

    Raises:
        MissingExtraError: FastAPI is not installed.
    """
    try:
        from fastapi import FastAPI, Request
        from fastapi.responses import JSONResponse
        from starlette.requests import ClientDisconnect
    except ImportError as error:
        raise MissingExtraError(f"the image route needs FastAPI: {_INSTALL}") from error
    app, numbers = FastAPI(title="omni-rollout"), itertools.count()

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [{"id": model, "object": "model", "owned_by": "omni-rollout"}]}

    async def generations(http: Request) -> Any:
        try:
            body = _object(await _bounded(http.stream()))
            requests = requests_of(body, pipeline, next(numbers))
            samples = await draw(requests)
            data = [{"b64_json": to_png(picture)} for picture in samples["responses"]]
        except RolloutError as error:
            status = 400 if isinstance(error, RolloutConfigError) else 503
            kind = "invalid_request_error" if status == 400 else "server_error"
            return JSONResponse({"error": {"message": str(error), "type": kind}}, status_code=status)
        except ClientDisconnect:  # nobody reads the answer
            return JSONResponse({}, status_code=499)
        ignored = [name for name in _IGNORED if body.get(name) is not None]
        note = {"note": f"ignored, without a meaning here: {', '.join(ignored)}"} if ignored else {}
        return JSONResponse({"created": int(time.time()), "data": data, **note})

    app.add_route("/v1/images/generations", generations, methods=["POST"])
    return app


class ImageServer:
    """`create_app` on 127.0.0.1, in the event loop that starts it. Args as there."""

    def __init__(self, draw: Draw, pipeline: DiffusionPipelineConfig, model: str = "policy") -> None:
        self._app = create_app(draw, pipeline, model)
        self._server: Any = None
        self._task: asyncio.Future[None] | None = None

    async def start(self, port: int) -> None:
        """Returns once connections are taken.

        Raises:
            RolloutConfigError: the port cannot be had. MissingExtraError: uvicorn is not installed.
        """
        try:
            import uvicorn
        except ImportError as error:
            raise MissingExtraError(f"serving needs uvicorn: {_INSTALL}") from error
        # Bound here: uvicorn would end the whole process over a port that is taken.
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", port))
        except OSError as error:
            listener.close()
            raise RolloutConfigError(
                f"vllm_omni.openai_port={port!r} cannot be had ({error}): choose another."
            ) from error
        self._server = uvicorn.Server(uvicorn.Config(self._app, log_level="warning"))
        self._task = asyncio.ensure_future(self._server.serve(sockets=[listener]))
        while not self._server.started and not self._task.done():
            await asyncio.sleep(0.01)

    async def close(self) -> None:
        """Finish what is being answered, and free the port."""
        if self._task is not None:
            self._server.should_exit = True
            await self._task
            self._task = None


async def _bounded(chunks: AsyncIterator[bytes]) -> bytes:
    """A request's body. Raises `RolloutConfigError` as soon as it is longer than any prompt."""
    body = bytearray()
    async for chunk in chunks:
        body += chunk
        if len(body) > _MAX_BODY:
            raise RolloutConfigError(f"the body is longer than the limit of {_MAX_BODY} bytes; send a shorter prompt.")
    return bytes(body)


def _object(body: bytes) -> dict[str, Any]:
    """The JSON object of a request; null means absent. Raises `RolloutConfigError` when it is none."""
    try:
        found = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RolloutConfigError(f"the body is no JSON: {type(error).__name__}: {error}") from error
    if not isinstance(found, dict):
        raise RolloutConfigError(f"the body must be a JSON object, not a {type(found).__name__}.")
    return {key: value for key, value in found.items() if value is not None}


def _number(body: dict[str, Any], name: str, default: Any, low: float, high: float, *, whole: bool = True) -> Any:
    """A number between `low` and `high`, both allowed."""
    value = body.get(name, default)
    if value is None:
        return None
    fits = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
    if not fits or not low <= value <= high:
        kind = "a whole number" if whole else "a number"
        raise RolloutConfigError(f"{name}={str(value)[:40]!s} must be {kind} from {low} to {high}.")
    return value


def _text(body: dict[str, Any], name: str, default: str | None) -> str | None:
    value = body.get(name, default)
    if value is not None and not isinstance(value, str):
        raise RolloutConfigError(f"{name}={value!r:.40} must be a text.")
    return value


def _size(body: dict[str, Any], pipeline: DiffusionPipelineConfig) -> tuple[int, int]:
    """Width and height."""
    size = body.get("size", "auto")
    if size == "auto":
        return pipeline.width, pipeline.height
    found = re.fullmatch(r"([1-9][0-9]{0,5})x([1-9][0-9]{0,5})", size) if isinstance(size, str) else None
    sides = (int(found[1]), int(found[2])) if found else (0, 0)
    if not all(0 < side <= _MAX_SIDE and side % _MULTIPLE == 0 for side in sides):
        raise RolloutConfigError(
            f"size={size!r:.40} must read like '512x512' (or 'auto'), each side a multiple of {_MULTIPLE} from {_MULTIPLE} to "
            f"{_MAX_SIDE}."
        )
    return sides


def requests_of(body: dict[str, Any], pipeline: DiffusionPipelineConfig, number: int) -> list[GenerationRequest]:
    """The requests of one call (a body without nulls). Raises `RolloutConfigError` for anything that is not allowed."""
    unknown = sorted(set(body) - {*_FIELDS, *_IGNORED})
    if unknown:
        raise RolloutConfigError(f"fields {unknown!r} are not known; allowed are {', '.join(sorted(_FIELDS))}.")
    for name, only in (("response_format", "b64_json"), ("output_format", "png"), ("stream", False)):
        if body.get(name, only) != only:
            raise RolloutConfigError(f"{name}={body[name]!r:.40} is not served: leave it out, or say {only!r}.")
    prompt = _text(body, "prompt", None)
    if not prompt or not prompt.strip():
        raise RolloutConfigError(f"prompt={prompt!r} must be a text, and not empty.")
    width, height = _size(body, pipeline)
    cfg = float(_number(body, "true_cfg_scale", pipeline.true_cfg_scale, 0, 100, whole=False))
    settings = SamplerSettings(
        width=width,
        height=height,
        num_inference_steps=_number(body, "num_inference_steps", pipeline.num_inference_steps, 1, 1000),
        true_cfg_scale=cfg,
        guidance_scale=_number(body, "guidance_scale", pipeline.guidance_scale, 0, 100, whole=False),
        max_sequence_length=pipeline.max_sequence_length,
    )
    return [
        GenerationRequest(
            request_id=f"image-{number}-{index}",
            uid="image",
            index=index,
            prompt=prompt,
            negative_prompt=_text(body, "negative_prompt", pipeline.negative_prompt),
            seed=_number(body, "seed", 0, 0, 2**63 - 1),
            settings=settings,
            adapter=_text(body, "adapter", "default") or "default",
            return_trajectory=False,
        )
        for index in range(_number(body, "n", 1, 1, _MAX_IMAGES))
    ]


def to_png(picture: Any) -> str:
    """uint8 [C, H, W] as base64 of a PNG."""
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(picture.permute(1, 2, 0).numpy()).save(buffer, format="PNG")
    return base64.b64encode(buffer.getvalue()).decode()
