"""A small HTTP server around one model: JSON in and out, health, metrics, a page to drop an image on.

For one machine or a trusted network: it has no accounts. It trusts no request: bodies are counted while they arrive,
an image's size is read before it is decoded, and what cannot be read is answered in one line.
"""

from __future__ import annotations

import base64
import binascii
import io
import json
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

import torch
from fastapi import FastAPI, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.middleware.trustedhost import TrustedHostMiddleware
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse
from starlette.exceptions import HTTPException
from starlette.middleware.base import RequestResponseEndpoint

from oneflare._version import __version__
from oneflare.data.images import decode
from oneflare.errors import DataError
from oneflare.fusion import GlobalModel
from oneflare.predicting import ranking

LOOPBACK = ("127.0.0.1", "localhost", "[::1]")


@dataclass(frozen=True)
class Limits:
    """What one request may cost."""

    body_bytes: int = 10_000_000
    pixels: int = 50_000_000
    images: int = 64


class RequestError(Exception):
    """A request that is answered with a status and one line."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


@dataclass
class Metrics:
    """Counters in Prometheus' text format."""

    requests: Counter[tuple[str, int]] = field(default_factory=Counter)
    images: int = 0
    seconds: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, path: str, status: int) -> None:
        with self.lock:
            self.requests[path, status] += 1

    def predicted(self, images: int, seconds: float) -> None:
        with self.lock:
            self.images += images
            self.seconds += seconds

    def text(self) -> str:
        with self.lock:
            lines = [
                "# HELP oneflare_requests_total Requests by path and status.",
                "# TYPE oneflare_requests_total counter",
                *(
                    f'oneflare_requests_total{{path="{path}",status="{status}"}} {number}'
                    for (path, status), number in sorted(self.requests.items())
                ),
                "# HELP oneflare_images_total Images classified.",
                "# TYPE oneflare_images_total counter",
                f"oneflare_images_total {self.images}",
                "# HELP oneflare_predict_seconds_total Time spent in the model.",
                "# TYPE oneflare_predict_seconds_total counter",
                f"oneflare_predict_seconds_total {self.seconds:.6f}",
                "# HELP oneflare_info The version that answers.",
                "# TYPE oneflare_info gauge",
                f'oneflare_info{{version="{__version__}"}} 1',
            ]
        return "\n".join(lines) + "\n"


class Predictor:
    """A model that several requests may ask at once; they are answered one after another."""

    def __init__(self, model: GlobalModel, limits: Limits) -> None:
        self.model = model
        self.limits = limits
        self.metrics = Metrics()
        self._lock = threading.Lock()  # a model of members refills one encoder

    def answer(self, contents: Sequence[bytes]) -> list[dict[str, Any]]:
        """Top classes of encoded images."""
        if not contents:
            raise RequestError(400, "there is no image in the request")
        if len(contents) > self.limits.images:
            raise RequestError(413, f"{len(contents)} images exceed the limit of {self.limits.images} per request")
        image = self.model.task.image
        names = [f"number {row + 1}" for row in range(len(contents))]
        for content, name in zip(contents, names, strict=True):
            self._check_pixels(content, name)
        try:
            images = decode(contents, names, image)
        except DataError as error:
            raise RequestError(400, str(error)) from None
        started = time.perf_counter()
        with self._lock, torch.no_grad():
            probabilities = self.model.predict_proba(images)
        self.metrics.predicted(len(contents), time.perf_counter() - started)
        return [ranking(row, self.model.task.classes) for row in probabilities]

    def _check_pixels(self, content: bytes, name: str) -> None:
        from PIL import Image

        try:
            with Image.open(io.BytesIO(content)) as image:
                width, height = image.size
        except Image.DecompressionBombError:
            raise RequestError(413, f"image {name} has too many pixels") from None
        except Exception:  # foreign bytes; many kinds, one meaning
            raise RequestError(400, f"image {name} is damaged or not an image") from None
        if width * height > self.limits.pixels:
            raise RequestError(413, f"image {name}: {width}x{height} exceeds {self.limits.pixels} pixels")


def build_app(model: GlobalModel, limits: Limits | None = None, hosts: Sequence[str] = LOOPBACK) -> FastAPI:
    """hosts: names under which browsers may reach it ("*": any), so that no other site can borrow it by DNS"""
    limits = limits or Limits()
    predictor = Predictor(model, limits)
    app = FastAPI(title="OneFlare", version=__version__, docs_url=None, redoc_url=None)  # those pages load from a CDN
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=list(hosts))
    task = model.task
    known = {"/", "/page.js", "/health", "/metrics", "/predict"}

    @app.middleware("http")
    async def watch(request: Request, call_next: RequestResponseEndpoint) -> Response:
        response = await call_next(request)
        path = request.url.path
        predictor.metrics.count(path if path in known else "other", response.status_code)
        response.headers["X-Content-Type-Options"] = "nosniff"
        response.headers["Content-Security-Policy"] = (
            "default-src 'none'; script-src 'self'; connect-src 'self'; img-src blob:; style-src 'unsafe-inline'; "
            "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        )
        return response

    @app.exception_handler(RequestError)
    async def refuse(request: Request, error: RequestError) -> JSONResponse:
        del request
        return JSONResponse({"error": str(error)}, error.status)

    @app.exception_handler(HTTPException)
    async def other(request: Request, error: HTTPException) -> JSONResponse:
        del request
        return JSONResponse({"error": str(error.detail)}, error.status_code)

    @app.get("/health")
    async def health() -> dict[str, Any]:
        image = task.image
        return {
            "status": "ok",
            "oneflare": __version__,
            "model": model.kind,
            "classes": list(task.classes),
            "image": {"channels": image.channels, "size": image.size},
            "limits": {"body_bytes": limits.body_bytes, "pixels": limits.pixels, "images": limits.images},
        }

    @app.get("/metrics")
    async def metrics() -> PlainTextResponse:
        return PlainTextResponse(predictor.metrics.text(), media_type="text/plain; version=0.0.4")

    @app.post("/predict")
    async def predict(request: Request) -> dict[str, Any]:
        """An image as the body, or JSON: {"images": ["base64", ...]}."""
        body = await _body(request, limits.body_bytes)
        kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
        contents = _from_json(body) if kind == "application/json" else [body]
        return {"predictions": await run_in_threadpool(predictor.answer, contents)}

    @app.get("/")
    async def page() -> HTMLResponse:
        return HTMLResponse(_asset("serve.html"))

    @app.get("/page.js")
    async def script() -> Response:
        return Response(_asset("serve.js"), media_type="text/javascript")

    return app


async def _body(request: Request, limit: int) -> bytes:
    """The body, given up as soon as it is too long, whatever its header says."""
    parts: list[bytes] = []
    length = 0
    async for part in request.stream():
        length += len(part)
        if length > limit:
            raise RequestError(413, f"the request exceeds {limit} bytes")
        parts.append(part)
    return b"".join(parts)


def _from_json(body: bytes) -> list[bytes]:
    try:
        content = json.loads(body)
    except (ValueError, RecursionError):
        raise RequestError(400, "the body is not valid JSON") from None
    images = content.get("images") if isinstance(content, dict) else None
    if not isinstance(images, list) or not all(isinstance(text, str) for text in images):
        raise RequestError(400, 'give {"images": ["base64", ...]}, or the bytes of one image as the body')
    try:
        return [base64.b64decode(text, validate=True) for text in images]
    except (binascii.Error, ValueError):
        raise RequestError(400, "an image is not valid base64") from None


def _asset(name: str) -> str:
    return resources.files("oneflare.assets").joinpath(name).read_text()
