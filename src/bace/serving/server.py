"""A model behind HTTP: the server's answers, and who may ask for them."""

import asyncio
import ipaddress
import logging
import re
import secrets
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import torch
import uvicorn
from fastapi import FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse
from pydantic import BaseModel, Field
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from bace.errors import BaceError, ConfigError
from bace.learner import Learner
from bace.progress import tell
from bace.serving.batching import Batcher, Overloaded
from bace.serving.examples import Held, Limits, Readers, Refused, from_files, from_json, is_json, read_body, read_files
from bace.serving.served import Watched

LOOPBACK = ("127.0.0.1", "localhost", "[::1]")  # its names, as a request writes them
MOST_CONNECTIONS = 1024
PAGES = Path(__file__).parent
POLICY = (
    "default-src 'none'; script-src 'nonce-{0}'; style-src 'nonce-{0}'; img-src blob:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


# -- the answers, for the description of the service


class Share(BaseModel):
    class_: str | int = Field(alias="class")
    probability: float


class Class(BaseModel):
    """The class of a picture or a text."""

    class_: str | int = Field(alias="class", description='the most probable class, or "unknown"')
    probability: float = Field(description="the probability of the most probable class")
    top: list[Share] = Field(description="the most probable classes, the most probable first")


class Entity(BaseModel):
    """An entity, with its position in the sentence in characters."""

    start: int
    end: int
    type: str
    text: str


class Sentence(BaseModel):
    words: list[str]
    tags: list[str]
    entities: list[Entity]


class Predictions(BaseModel):
    version: int = Field(description="the version of the model that answered: 1, then one more for each new model")
    predictions: list[Class] | list[Sentence] = Field(description="one for each example, in order")


class LimitsTold(BaseModel):
    body: int = Field(description="bytes in a request")
    examples: int = Field(description="examples in a request")
    total: int = Field(description="bytes in all requests that are being answered")


class Classes(BaseModel):
    modality: str
    method: str
    version: int
    loaded: str
    classes: list[str | int] = Field(description="classes, or entity types, in order of arrival")
    limits: LimitsTold


class Health(BaseModel):
    status: str
    problem: str | None = Field(description="why a changed model folder could not be opened")
    modality: str
    method: str
    version: int
    loaded: str
    classes: int
    requests: int = Field(description="requests answered since the start")
    examples: int = Field(description="examples predicted since the start")
    batches: int = Field(description="batches in which they went through the model")
    waiting: int = Field(description="examples that are waiting now")
    held: int = Field(description="bytes in the requests that are being answered")
    threads: int = Field(description="processor cores that the model may use")


class Reason(BaseModel):
    detail: str


FILE = {"type": "string", "format": "binary", "description": "a picture, or a file with one text or sentence per line"}
BODIES = {
    "application/json": {
        "schema": {
            "type": "object",
            "required": ["inputs"],
            "additionalProperties": False,
            "properties": {
                "inputs": {
                    "type": "array",
                    "items": {"description": "a text; a sentence as a string or a list of words; a picture in base64"},
                }
            },
        },
        "example": {"inputs": ["the first text", "the second text"]},
    },
    "multipart/form-data": {
        "schema": {
            "type": "object",
            "properties": {"file": {"type": "array", "items": FILE}},
        }
    },
    "image/*": {"schema": {"type": "string", "format": "binary", "description": "one picture"}},
    "text/plain": {"schema": {"type": "string", "description": "one text or sentence per line, or CoNLL's layout"}},
}
REFUSALS: dict[int | str, dict[str, Any]] = {
    400: {"model": Reason, "description": "The request cannot be read."},
    413: {"model": Reason, "description": "The request has too many bytes, examples or letters."},
    415: {"model": Reason, "description": "The body is a table."},
    422: {"model": Reason, "description": "The model cannot take an example."},
    503: {"model": Reason, "description": "Too many examples are waiting, or too many bytes are held."},
}


def make_app(watched: Watched, batcher: Batcher, limits: Limits, *, hosts: tuple[str, ...] = ()) -> FastAPI:
    """The service. `hosts`: the names by which clients may call it; none means any name. If a foreign web page makes
    its own name point to this machine (DNS rebinding), it cannot read the answers of a service on the loopback."""

    @asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        yield
        watched.close()
        readers.close()
        batcher.close()

    about = "Predictions of a model that learns class by class. Errors have a reason in `detail`."
    app = FastAPI(
        title="bace", version=version("bace-cil"), description=about, docs_url=None, redoc_url=None, lifespan=life
    )
    held, readers = Held(limits.total), Readers()
    if hosts:
        app.add_middleware(OwnNames, names=hosts)
    add_refusals(app)
    add_pages(app)
    add_predictions(app, watched, batcher, limits, held, readers)
    add_facts(app, watched, batcher, limits, held)
    return app


def add_predictions(
    app: FastAPI, watched: Watched, batcher: Batcher, limits: Limits, held: Held, readers: Readers
) -> None:
    @app.post(
        "/predict",
        response_model=None,
        responses={200: {"model": Predictions}, **REFUSALS},
        openapi_extra={"requestBody": {"required": True, "content": BODIES}},
    )
    async def predict(
        request: Request,
        reject: Annotated[
            float | None, Query(ge=0, le=1, description='for pictures and texts: a lower probability is "unknown"')
        ] = None,
        top: Annotated[int, Query(ge=1, le=10_000, description="the number of most probable classes to return")] = 5,
    ) -> JSONResponse:
        """The class of each picture or text, with probabilities; the entities of each sentence."""
        model = watched.model
        if reject is not None and not model.modality.one_label:
            raise Refused(422, "reject is for models of pictures and texts: sentences have no probabilities")
        with held.request() as take:
            body = await read_body(request, limits.body, take)
            if is_json(request.headers, body):
                examples = await readers.read(len(body), from_json, model, body, limits)
            else:
                files = await read_files(request.headers, body, limits.examples)
                examples = await readers.read(len(body), from_files, model, files, limits)
            found = await asyncio.wrap_future(batcher.submit(model.predict, examples))
        answers = [model.answer(each, reject, top) for each in found]
        return JSONResponse({"version": model.version, "predictions": answers})


def add_facts(app: FastAPI, watched: Watched, batcher: Batcher, limits: Limits, held: Held) -> None:
    @app.get("/classes", response_model=None, responses={200: {"model": Classes}})
    async def classes() -> dict[str, Any]:
        """The classes that the model knows, and the limits of a request."""
        model = watched.model  # read once: it may be replaced
        return {**model.facts, "classes": model.learner.classes_, "limits": vars(limits)}

    @app.get("/health", response_model=None, responses={200: {"model": Health}})
    async def health() -> dict[str, Any]:
        """The state of the server, its model, and the number of requests so far."""
        counted = {name: getattr(batcher, name) for name in ("requests", "examples", "batches", "waiting")}
        counted |= {"held": held.bytes, "threads": torch.get_num_threads()}
        model = watched.model
        known = len(model.learner.classes_)
        return {"status": "ok", "problem": watched.problem, **model.facts, "classes": known, **counted}


def add_refusals(app: FastAPI) -> None:
    """Report every error as a sentence in JSON."""

    def told(status: int, reason: str, **headers: str) -> JSONResponse:
        return JSONResponse({"detail": reason}, status, headers)

    @app.exception_handler(BaceError)
    async def refused(request: Request, error: BaceError) -> JSONResponse:
        if isinstance(error, Overloaded):
            return told(503, str(error), **{"Retry-After": "1"})
        return told(error.status if isinstance(error, Refused) else 422, str(error))

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        return told(422, "; ".join(f"{each['loc'][-1]}: {each['msg']}" for each in error.errors()))

    @app.exception_handler(ClientDisconnect)
    async def gone(request: Request, error: ClientDisconnect) -> JSONResponse:
        return told(400, "the request ended before its body did")

    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> JSONResponse:
        return told(500, "the server has failed; its standard error says how")


def add_pages(app: FastAPI) -> None:
    """Add the pages. They load nothing from elsewhere and run only their own scripts."""
    for path, name in {"/": "page.html", "/docs": "docs.html"}.items():
        text = (PAGES / name).read_text(encoding="utf-8")

        async def page(text: str = text) -> HTMLResponse:
            nonce = secrets.token_urlsafe(24)
            headers = {"Content-Security-Policy": POLICY.format(nonce), "X-Content-Type-Options": "nosniff"}
            return HTMLResponse(text.replace("{{ nonce }}", nonce), headers=headers)

        app.add_api_route(path, page, include_in_schema=False, response_class=HTMLResponse, response_model=None)


class OwnNames:
    """Refuses requests that call the server by a name other than these."""

    def __init__(self, app: ASGIApp, names: tuple[str, ...]) -> None:
        self.app, self.names = app, names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            called = re.sub(r":[0-9]*$", "", Headers(scope=scope).get("host", "")).lower()  # without the port
            if called not in self.names:
                reason = f"this server is called {' or '.join(self.names)}, not {called!r:.100}"
                await JSONResponse({"detail": reason}, 400)(scope, receive, send)
                return
        await self.app(scope, receive, send)


def own_names(host: str) -> tuple[str, ...]:
    """The names by which clients may call a server at this address; none means any, if it is not the loopback."""
    if not ipaddress.ip_address(host).is_loopback:
        return ()
    return tuple(dict.fromkeys([*LOOPBACK, f"[{host}]" if ":" in host else host]))


def listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or error
        said = f"the server cannot listen at {host}, port {port} ({why})"
        raise ConfigError(f"{said}: choose another --host or --port") from error


def serve(
    folder: Path,
    open_model: Callable[[], Learner],
    *,
    address: tuple[str, int],
    batch: int,
    max_body: int,
    max_examples: int,
    max_total: int,
    watch: float,
    threads: int | None,
) -> None:
    """Serve until a signal ends it. `threads`: of torch; None: all but one."""
    threads = threads or max(torch.get_num_threads() - 1, 1)

    def opened() -> Learner:
        learner = open_model()
        torch.set_num_threads(threads)  # opening sets the number that the model was trained with
        return learner

    logging.getLogger("python_multipart").setLevel(logging.ERROR)  # the sender of a broken form gets an answer
    with closing(listen(*address)) as listening:
        watched = Watched(folder, opened, watch)
        host, port = listening.getsockname()[:2]
        limits = Limits(max_body, max_examples, max_total)
        app = make_app(watched, Batcher(batch), limits, hosts=own_names(host))
        config = uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,
            proxy_headers=False,
            limit_concurrency=MOST_CONNECTIONS,
            timeout_graceful_shutdown=5,
        )
        where = f"[{host}]" if ":" in host else host
        known = len(watched.model.learner.classes_)
        tell(f"{folder} ({known} classes) is served at http://{where}:{port}; stop it with Ctrl-C")
        uvicorn.Server(config).run(sockets=[listening])
