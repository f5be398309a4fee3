"""A small HTTP server around one model: JSON, health, metrics, and a page for images.

For one machine or a trusted network: it has no accounts. It trusts no request: `serving.limits` lists what
requests may cost, and whatever exceeds that or cannot be read is answered with its own status and one line of JSON.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from importlib import resources
from typing import Any

import torch
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from oneflare._version import __version__
from oneflare.data.reading import read_all
from oneflare.errors import DataError
from oneflare.models import GlobalModel
from oneflare.models.cards import CardText
from oneflare.models.predicting import described
from oneflare.models.serving.bodies import images_of
from oneflare.models.serving.limits import Limits, RequestError, bounded

LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
PATHS = ("/", "/page.js", "/about", "/health", "/metrics", "/predict")
SECURITY_HEADERS = [
    (b"x-content-type-options", b"nosniff"),
    (
        b"content-security-policy",
        b"default-src 'none'; script-src 'self'; connect-src 'self'; img-src blob:; style-src 'unsafe-inline'; "
        b"base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
]

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


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

    def refused(self, status: int) -> None:
        """A connection that never became a request."""
        self.count("none", status)

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
    """A model behind a queue: bodies are read into memory up to a total, and answered one after another.

    One request at a time is parsed, decoded and classified, so the images of one request are all that is ever decoded.
    """

    def __init__(self, model: GlobalModel, limits: Limits) -> None:
        self.model = model
        self.limits = limits
        self.metrics = Metrics()
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="model")
        self._waiting = 0
        self._held_bytes = 0

    async def answer(self, request: Request) -> list[dict[str, Any]]:
        """Top classes of the images in a request."""
        held = [0]
        try:
            body = await self._body(request, held)
            if self._waiting >= self.limits.waiting:
                raise RequestError(429, f"{self._waiting} requests are waiting for the model; try again later")
            content_type = request.headers.get("content-type", "")
            self._waiting += 1
            job = self._worker.submit(self._classify, content_type, body)
            loop = asyncio.get_running_loop()
            job.add_done_callback(lambda _: loop.call_soon_threadsafe(self._done))  # also if nobody waits any more
            return await asyncio.wrap_future(job)
        finally:
            self._held_bytes -= held[0]

    def _done(self) -> None:
        self._waiting -= 1

    async def _body(self, request: Request, held: list[int]) -> bytes:
        """The body, given up as soon as it is too long or too slow, whatever its header says."""
        limits = self.limits
        stated = request.headers.get("content-length", "0")
        if stated.isdecimal() and int(stated[:20]) > limits.body_bytes:
            raise RequestError(413, f"the request exceeds {limits.body_bytes:,} bytes")
        parts: list[bytes] = []
        try:
            async with asyncio.timeout(limits.body_seconds):
                async for part in request.stream():
                    held[0] += len(part)
                    self._held_bytes += len(part)
                    if held[0] > limits.body_bytes:
                        raise RequestError(413, f"the request exceeds {limits.body_bytes:,} bytes")
                    if self._held_bytes > limits.held_bytes:
                        raise RequestError(503, "the server holds as many requests as it may; try again later")
                    parts.append(part)
        except TimeoutError:
            raise RequestError(408, f"the body did not arrive within {limits.body_seconds:g} seconds") from None
        except ClientDisconnect:
            raise RequestError(400, "the connection ended within the body") from None
        return b"".join(parts)

    def _classify(self, content_type: str, body: bytes) -> list[dict[str, Any]]:
        contents = images_of(content_type, body, self.limits)
        image = self.model.task.image.decoded
        names = [f"number {row + 1}" for row in range(len(contents))]
        try:
            images = read_all(contents, names, image)
        except DataError as error:
            raise RequestError(422, str(error)) from None
        started = time.perf_counter()
        with torch.no_grad():
            answers = self.model.answers(images)
        self.metrics.predicted(len(contents), time.perf_counter() - started)
        return described(self.model, answers)


class RequestGate:
    """What every request passes: is it for this host, is its header short, is it answered in time; then it is counted.

    hosts: names under which browsers may reach the server ("*": any), so that no other site can borrow it by DNS
    """

    def __init__(self, app: Any, predictor: Predictor, hosts: Sequence[str]) -> None:
        self.app, self.metrics, self.limits = app, predictor.metrics, predictor.limits
        self.hosts = frozenset(hosts)

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        path, started = scope["path"], False

        async def watched(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                message["headers"] = [*message.get("headers", []), *SECURITY_HEADERS]
                self.metrics.count(path if path in PATHS else "other", message["status"])
            await send(message)

        try:
            self._check(scope)
            async with asyncio.timeout(self.limits.request_seconds):
                await self.app(scope, receive, watched)
        except RequestError as error:
            await _refusal(error)(scope, receive, watched)
        except TimeoutError:
            if not started:
                late = RequestError(504, f"there is no answer within {self.limits.request_seconds:g} seconds")
                await _refusal(late)(scope, receive, watched)

    def _check(self, scope: Message) -> None:
        size = sum(len(name) + len(value) for name, value in scope["headers"]) + len(scope["raw_path"])
        if size + len(scope["query_string"]) > self.limits.header_bytes:
            raise RequestError(431, f"the header of the request exceeds {self.limits.header_bytes:,} bytes")
        host = next((value.decode("latin-1") for name, value in scope["headers"] if name == b"host"), "")
        name = host[: host.find("]") + 1] if host.startswith("[") else host.partition(":")[0]
        if "*" not in self.hosts and name.lower() not in self.hosts:
            raise RequestError(421, "this server does not answer for the host that the request names")


def _refusal(error: RequestError) -> JSONResponse:
    headers = {"Retry-After": "1"} if error.status in (429, 503) else {}
    if error.status in (408, 413, 431):
        headers["Connection"] = "close"
    return JSONResponse({"error": str(error)}, error.status, headers)


def _about(model: GlobalModel) -> dict[str, Any]:
    """What the model takes and answers with."""
    image = model.task.image.decoded
    return {"classes": list(model.task.classes), "image": {"channels": image.channels, "size": image.size}}


def _answer_errors(app: FastAPI) -> None:
    """Whatever goes wrong is answered with its own status and one line of JSON."""

    @app.exception_handler(RequestError)
    async def refuse(request: Request, error: RequestError) -> JSONResponse:
        del request
        return _refusal(error)

    @app.exception_handler(HTTPException)
    async def other(request: Request, error: HTTPException) -> JSONResponse:
        del request
        return JSONResponse({"error": str(error.detail)}, error.status_code)

    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> JSONResponse:
        del request, error
        return JSONResponse({"error": "the server failed on this request; its log says why"}, 500)


def build_app(
    model: GlobalModel,
    limits: Limits | None = None,
    hosts: Sequence[str] = LOOPBACK,
    metrics: Metrics | None = None,
    card: CardText | None = None,
) -> FastAPI:
    """hosts: names under which browsers may reach it ("*": any); metrics: where to count; card: what the page tells"""
    limits = limits or Limits()
    predictor = Predictor(model, limits)
    predictor.metrics = metrics or predictor.metrics
    app = FastAPI(title="OneFlare", version=__version__, docs_url=None, redoc_url=None)  # those pages load from a CDN
    app.add_middleware(RequestGate, predictor=predictor, hosts=hosts)
    _answer_errors(app)

    @app.get("/health")
    async def health() -> dict[str, Any]:
        told = {"status": "ok", "oneflare": __version__, "model": model.kind}
        return told | _about(model) | {"limits": asdict(limits)}

    @app.get("/about")
    async def about() -> dict[str, Any]:
        """What whoever asks should know: use and limits from the card, classes and how one of them is chosen."""
        decision = model.decision
        return _about(model) | {
            "use": "" if card is None else card.use,
            "limits": [] if card is None else list(card.limits),
            "thresholds": None if decision is None else list(decision.thresholds),
            "keeps": None if decision is None or decision.floor is None else decision.keeps,
        }

    @app.get("/metrics")
    async def shown_metrics() -> PlainTextResponse:
        return PlainTextResponse(predictor.metrics.text(), media_type="text/plain; version=0.0.4")

    @app.post("/predict")
    async def predict(request: Request) -> dict[str, Any]:
        """An image as the body, JSON: {"images": ["base64", ...]}, or a form with image files."""
        return {"predictions": await predictor.answer(request)}

    @app.get("/")
    async def page() -> HTMLResponse:
        return HTMLResponse(_page("page.html"))

    @app.get("/page.js")
    async def script() -> Response:
        return Response(_page("page.js"), media_type="text/javascript")

    return app


def make_server(
    model: GlobalModel, limits: Limits | None = None, hosts: Sequence[str] = LOOPBACK, card: CardText | None = None
) -> uvicorn.Server:
    """A server whose `run(sockets=[...])` answers on bound sockets until a signal, or `should_exit`, stops it."""
    limits, metrics = limits or Limits(), Metrics()
    logging.getLogger("python_multipart").setLevel(logging.CRITICAL)  # a stranger's broken form is no event of ours
    config = uvicorn.Config(
        build_app(model, limits, hosts, metrics, card),
        http=bounded(limits, metrics.refused),
        ws="none",
        h11_max_incomplete_event_size=limits.header_bytes,
        timeout_keep_alive=5,
        timeout_graceful_shutdown=5,
        log_level="error",
        server_header=False,
    )
    return uvicorn.Server(config)


def _page(name: str) -> str:
    return resources.files("oneflare.models.serving").joinpath(name).read_text()
