"""`POST /v1/images/generations` in OpenAI's form, for people who want to look at the policy that samples now.

Rollouts do not come through here: they need trajectories, which this route does not carry. Works over anything with
`await generate(request)`: a server, a replica, a router.
"""

from __future__ import annotations

import asyncio
import base64
import io
import itertools
import socket
import time
from typing import TYPE_CHECKING, Any

from .config import DiffusionPipelineConfig
from .errors import MissingExtraError, ReplicaError, RolloutConfigError, RolloutError
from .types import GenerationRequest

if TYPE_CHECKING:
    from .agent_loop import Client

_FIELDS = {
    "prompt", "n", "size", "seed", "negative_prompt", "num_inference_steps", "true_cfg_scale", "guidance_scale", "adapter",
    "model", "response_format", "user",
}  # fmt: skip
_MAX_IMAGES = 16


def create_app(client: Client, pipeline: DiffusionPipelineConfig, model: str = "policy") -> Any:
    """A FastAPI application.

    Args:
        client: where pictures come from.
        pipeline: defaults for what a request leaves out.
        model: name shown under `/v1/models`.

    Raises:
        MissingExtraError: FastAPI is not installed.
    """
    try:
        from fastapi import Body, FastAPI
        from fastapi.responses import JSONResponse
    except ImportError as error:
        raise MissingExtraError("the image route needs FastAPI: pip install './packages/omni-rollout[http]'") from error
    app, numbers = FastAPI(title="omni-rollout"), itertools.count()

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [{"id": model, "object": "model", "owned_by": "omni-rollout"}]}

    @app.post("/v1/images/generations")
    async def generations(body: dict[str, Any] = Body(...)) -> Any:  # noqa: B008 - FastAPI's way
        try:
            requests = requests_of(body, pipeline, next(numbers))
            pictures = await asyncio.gather(*(client.generate(request) for request in requests))
            data = [{"b64_json": to_png(picture.diffusion_output)} for picture in pictures]
        except RolloutError as error:
            status = 400 if isinstance(error, RolloutConfigError) else 503
            kind = "invalid_request_error" if status == 400 else "server_error"
            return JSONResponse({"error": {"message": str(error), "type": kind}}, status_code=status)
        return {"created": int(time.time()), "data": data}

    return app


class ImageServer:
    """`create_app` on 127.0.0.1, in the event loop that starts it. Args as there."""

    def __init__(self, client: Client, pipeline: DiffusionPipelineConfig, model: str = "policy") -> None:
        self._app = create_app(client, pipeline, model)
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
            raise MissingExtraError("serving needs uvicorn: pip install './packages/omni-rollout[http]'") from error
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


def requests_of(body: dict[str, Any], pipeline: DiffusionPipelineConfig, number: int) -> list[GenerationRequest]:
    """The requests of one call. Raises `RolloutConfigError` for anything that is not allowed."""
    unknown = sorted(set(body) - _FIELDS)
    if unknown:
        raise RolloutConfigError(f"fields {unknown!r} are not known; allowed are {', '.join(sorted(_FIELDS))}.")
    prompt, count = body.get("prompt"), body.get("n", 1)
    if not isinstance(prompt, str) or not prompt:
        raise RolloutConfigError(f"prompt={prompt!r} must be a text.")
    if not isinstance(count, int) or not 1 <= count <= _MAX_IMAGES:
        raise RolloutConfigError(f"n={count!r} must be 1 to {_MAX_IMAGES}.")
    if body.get("response_format", "b64_json") != "b64_json":
        raise RolloutConfigError("response_format must be 'b64_json': pictures are not kept on a server.")
    size = str(body.get("size", f"{pipeline.width}x{pipeline.height}")).split("x")
    if len(size) != 2 or not all(part.isdigit() for part in size):
        raise RolloutConfigError(f"size={body.get('size')!r} must read like '512x512'.")
    cfg = float(body.get("true_cfg_scale", pipeline.true_cfg_scale))
    return [
        GenerationRequest(
            request_id=f"image-{number}-{index}",
            uid="image",
            index=index,
            prompt=prompt,
            negative_prompt=body.get("negative_prompt", pipeline.negative_prompt),
            seed=int(body.get("seed", 0)),
            width=int(size[0]),
            height=int(size[1]),
            num_inference_steps=int(body.get("num_inference_steps", pipeline.num_inference_steps)),
            true_cfg_scale=cfg,
            guidance_scale=body.get("guidance_scale", pipeline.guidance_scale),
            max_sequence_length=pipeline.max_sequence_length,
            adapter=body.get("adapter", "default"),
            return_trajectory=False,
        )
        for index in range(count)
    ]


def to_png(picture: Any) -> str:
    """uint8 [C, H, W] as base64 of a PNG. An aborted sample raises `ReplicaError`."""
    from PIL import Image

    if picture is None:
        raise ReplicaError("the picture was cancelled before it was finished.")
    buffer = io.BytesIO()
    Image.fromarray(picture.permute(1, 2, 0).numpy()).save(buffer, format="PNG")
    return base64.b64encode(buffer.getvalue()).decode()
