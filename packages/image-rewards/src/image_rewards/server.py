"""The scorer service: `python -m image_rewards serve --reward ocr --port 8100`.

    POST /score    samples in, results out (`wire.py` has the format)
    GET  /health   200 while the reward answers, 503 when it is stuck; no token
    GET  /metrics  counters in Prometheus' text format

It listens on the loopback interface by default, and elsewhere only with a bearer token. Bytes are counted while a body is
read, so a large body costs no more memory than the limit.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import logging
import socket
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from .base import Reward, RewardResult
from .batching import Batcher, Limits, OverloadedError
from .errors import RewardError, RewardInputError, RewardTimeoutError, missing_extra, require
from .manager import ImageRewardManager
from .wire import decode_samples, decompress, encode_results

log = logging.getLogger("image_rewards.server")


class _RefusedError(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def create_app(reward: Reward, *, token: str = "", limits: Limits | None = None) -> Any:
    """The FastAPI application around `reward`. token: required as "Authorization: Bearer ..." where not empty."""
    try:
        from fastapi import FastAPI, Request, Response
        from fastapi.responses import JSONResponse, PlainTextResponse
        from starlette.requests import ClientDisconnect
    except ImportError as error:
        raise missing_extra("fastapi", "server", "the scorer service") from error

    limits = limits or Limits()
    batcher = Batcher(ImageRewardManager(reward), reward.batch_size, limits)
    inflight = 0
    statuses: Counter[int] = Counter()

    @asynccontextmanager
    async def lifespan(_: Any) -> AsyncIterator[None]:
        batcher.start()
        yield
        await batcher.stop()
        reward.close()

    app = FastAPI(title="image-rewards", lifespan=lifespan, openapi_url=None)

    def authorize(request: Request) -> None:
        given = request.headers.get("authorization", "")
        if token and not hmac.compare_digest(given.encode(), f"Bearer {token}".encode()):
            raise _RefusedError(401, "this scorer needs its bearer token.")

    async def read_body(request: Request, size: int) -> bytes:
        """The body, which must be as long as was announced."""
        body = bytearray()
        try:
            async with asyncio.timeout(limits.timeout_s):  # or a silent client would hold its share for ever
                async for chunk in request.stream():
                    body += chunk
                    if len(body) > size:
                        raise _RefusedError(400, f"the body is longer than its Content-Length of {size}.")
        except TimeoutError as error:
            raise _RefusedError(408, f"{len(body)} of {size} bytes came in {limits.timeout_s} s.") from error
        except ClientDisconnect as error:  # nobody reads this; it is counted
            raise _RefusedError(499, f"the client left after {len(body)} of {size} bytes.") from error
        if len(body) != size:
            raise _RefusedError(400, f"the body ends after {len(body)} of {size} bytes.")
        return bytes(body)

    async def handle(request: Request) -> Response:
        nonlocal inflight
        authorize(request)
        announced = request.headers.get("content-length", "")
        if not announced.isdigit():
            raise _RefusedError(411, "say the body's size in Content-Length.")
        size = int(announced)
        if size > limits.body_bytes:
            raise _RefusedError(
                413, f"the body of {size} bytes is over the limit of {limits.body_bytes}. Send fewer samples."
            )
        if inflight + size > limits.inflight_bytes:
            raise OverloadedError(f"{inflight} bytes are in flight; {size} more would pass {limits.inflight_bytes}.")
        inflight += size
        try:
            body = await read_body(request, size)
            try:
                body = decompress(body, request.headers.get("content-encoding", ""), limits.body_bytes)
            except ValueError as error:
                raise _RefusedError(415 if "not read" in str(error) else 400, f"{error}.") from error
            kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
            results = await batcher.score(decode_samples(body, kind, limits.request_samples))
        finally:
            inflight -= size
        return Response(encode_results([_told(result) for result in results]), media_type="application/json")

    async def score(request: Request) -> Response:
        try:
            response = await handle(request)
        except _RefusedError as error:
            response = JSONResponse({"error": str(error)}, error.status)
        except OverloadedError as error:
            response = JSONResponse({"error": str(error)}, 503, {"Retry-After": "1"})
        except RewardTimeoutError as error:
            response = JSONResponse({"error": str(error)}, 504)
        except RewardInputError as error:
            response = JSONResponse({"error": f"{type(error).__name__}: {error}"}, 422)
        statuses[response.status_code] += 1
        return response

    async def health(_: Request) -> Response:
        stuck = batcher.stuck_s > limits.timeout_s
        state = {"status": "stuck" if stuck else "ok", "reward": reward.name, "pending": batcher.pending}
        return JSONResponse(state, 503 if stuck else 200)

    async def metrics(request: Request) -> Response:
        try:
            authorize(request)
        except _RefusedError as error:
            return JSONResponse({"error": str(error)}, error.status)
        lines = [f'image_rewards_requests_total{{status="{k}"}} {v}' for k, v in sorted(statuses.items())]
        for name in ("scored", "failed", "rejected", "timed_out"):
            lines.append(f'image_rewards_samples_total{{outcome="{name}"}} {batcher.counts[name]}')
        lines.append(f"image_rewards_batches_total {batcher.counts['batches']}")
        lines.append(f"image_rewards_batch_seconds_total {batcher.counts['batch_us'] / 1e6}")
        lines.append(f"image_rewards_pending_samples {batcher.pending}")
        lines.append(f"image_rewards_inflight_bytes {inflight}")
        return PlainTextResponse("\n".join(lines) + "\n")

    app.add_route("/score", score, methods=["POST"])
    app.add_route("/health", health, methods=["GET"])
    app.add_route("/metrics", metrics, methods=["GET"])
    return app


def _told(result: RewardResult) -> RewardResult:
    """What the client sees: the error without the traceback, which stays in this process's log."""
    if result.error is None or "\n" not in result.error:
        return result
    log.error("a sample failed: %s", result.error)
    return replace(result, error=result.error.splitlines()[0])


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def serve(
    reward: Reward, *, host: str = "127.0.0.1", port: int = 8100, token: str = "", limits: Limits | None = None
) -> None:
    """Run the service until it is stopped. Raises `RewardConfigError` for a reachable host without a token."""
    require(
        is_loopback(host) or token != "",
        f"host={host!r} can be reached from other machines, and there is no token. Set the environment variable "
        "IMAGE_REWARDS_TOKEN, or listen on 127.0.0.1.",
    )
    try:
        import uvicorn
    except ImportError as error:
        raise missing_extra("uvicorn", "server", "the scorer service") from error
    app = create_app(reward, token=token, limits=limits)
    require(0 <= port <= 65535, f"port={port!r} must be 0 (any that is free) to 65535.")
    try:
        # Bound here: uvicorn would end the whole process over a port that is taken.
        listener = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise RewardError(f"the service could not start on {host}:{port} ({error}). Choose another port.") from error
    shown = f"[{host}]" if ":" in host else host
    print(f"{reward.name} is served on http://{shown}:{listener.getsockname()[1]}/score", file=sys.stderr, flush=True)
    settings = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=30)
    uvicorn.Server(settings).run(sockets=[listener])
