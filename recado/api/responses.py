"""What the API answers when something is wrong, and the headers of all its answers."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from types import MappingProxyType

from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from recado.api.health import DATABASE_TROUBLE

logger = logging.getLogger("recado.api")

HEADERS = MappingProxyType({"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"})
"""Of every response that does not say otherwise: what it shows is of this moment and for this client."""

SENTENCES = MappingProxyType(
    {
        401: "cannot answer this request: it has no valid credentials; send a bearer token",
        403: "cannot answer this request: its credentials lack the scope for it; use others",
        404: "cannot answer this request: there is nothing at this address; check its path",
        405: "cannot answer this request: its method is not for this address; see the Allow header",
        500: "cannot answer this request: the API failed; its log says why",
        503: "cannot answer this request: the database is not available; try again later",
    }
)
"""What stands in the body of an error that brings no sentence of its own."""


def error_response(status: int, sentence: str | None = None, headers: Mapping[str, str] | None = None) -> JSONResponse:
    """``{"error": sentence}``; without one, the status has its own."""
    return JSONResponse({"error": sentence or SENTENCES[status]}, status, headers)


async def http_error(request: Request, error: Exception) -> JSONResponse:
    """The answer to an ``HTTPException``."""
    assert isinstance(error, HTTPException)
    sentence = error.detail
    if sentence == HTTPStatus(error.status_code).phrase:
        sentence = SENTENCES.get(error.status_code, sentence)
    return error_response(error.status_code, sentence, error.headers)


async def database_error(request: Request, error: Exception) -> JSONResponse:
    """A 503, and the log says why."""
    logger.error("cannot answer %r: the database is not available", request.url.path, exc_info=error)
    return error_response(503)


HANDLERS: Mapping[type[Exception], Callable[[Request, Exception], Awaitable[Response]]] = MappingProxyType(
    {HTTPException: http_error, **dict.fromkeys(DATABASE_TROUBLE, database_error)}
)
"""Exception handlers, as Starlette takes them."""


def with_headers(app: ASGIApp) -> ASGIApp:
    """Middleware: :data:`HEADERS`, where the response does not have them itself."""

    async def wrapped(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        await app(scope, receive, send_with_headers)

    return wrapped
