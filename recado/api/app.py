"""The HTTP side: an ASGI application, to be served alone or mounted in another."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from types import MappingProxyType

from starlette.applications import Starlette
from starlette.authentication import AuthenticationBackend, AuthenticationError
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.authentication import AuthenticationMiddleware
from starlette.requests import HTTPConnection, Request
from starlette.responses import JSONResponse
from starlette.routing import Mount, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from recado.api import auth
from recado.api.health import DATABASE_TROUBLE, healthz, readyz
from recado.api.metrics import metricas, metrics
from recado.app import Recado
from recado.queue.connections import Pool
from recado.settings import Token

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


def create_app(
    app: Recado,
    pool: Pool,
    *,
    authentication: AuthenticationBackend | None = None,
    tokens: Sequence[Token] | None = None,
) -> Starlette:
    """The API of ``app``'s queue, for a server of its own or for ``Mount("/queue", create_app(app, pool))``.

    ``/healthz`` and ``/readyz`` are open to all. Everything else demands a user: one of ``authentication``'s,
    the holder of one of ``tokens``, or the user of the application around it. With none of these configured
    only direct requests from this machine are answered. :mod:`recado.api.auth` tells the whole of it.

    Args:
        app: the application whose schema is looked at.
        pool: where the connections come from; it is the caller's to open and to close.
        authentication: the user's own backend, which hands out the scopes ``jobs:admin`` and ``jobs:metrics``.
        tokens: the bearer tokens to accept; ``None`` takes those of ``RECADO_TOKENS``, an empty list none.

    Raises:
        ConfigurationError: both ``authentication`` and ``tokens`` are given.
    """
    protected = Mount(
        "",
        routes=[
            Route("/api/v1/jobs/metricas", metricas),
            Route("/metrics", metrics),
        ],
        middleware=[
            Middleware(
                AuthenticationMiddleware,
                backend=auth.backend(authentication, tokens),
                on_error=_invalid_credentials,
            ),
            Middleware(auth.require_user),
        ],
    )
    api = Starlette(
        routes=[Route("/healthz", healthz), Route("/readyz", readyz), protected],
        middleware=[Middleware(_with_headers)],
        exception_handlers={
            HTTPException: _http_error,
            **dict.fromkeys(DATABASE_TROUBLE, _database_error),
            Exception: _failure,
        },
    )
    api.state.pool = pool
    api.state.schema = app.schema
    return api


def _error(status: int, sentence: str | None = None, headers: Mapping[str, str] | None = None) -> JSONResponse:
    return JSONResponse({"error": sentence or SENTENCES[status]}, status, headers)


def _invalid_credentials(conn: HTTPConnection, error: AuthenticationError) -> JSONResponse:
    # The backend's own words stay out of it: they might quote what was sent.
    return _error(401, headers={"WWW-Authenticate": auth.INVALID_TOKEN})


async def _http_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    sentence = error.detail
    if sentence == HTTPStatus(error.status_code).phrase:
        sentence = SENTENCES.get(error.status_code, sentence)
    return _error(error.status_code, sentence, error.headers)


async def _database_error(request: Request, error: Exception) -> JSONResponse:
    logger.error("cannot answer %r: the database is not available", request.url.path, exc_info=error)
    return _error(503)


async def _failure(request: Request, error: Exception) -> JSONResponse:
    # Starlette raises the error again once this is sent, and the server logs it. This response passes no
    # middleware any more.
    return _error(500, headers=HEADERS)


def _with_headers(app: ASGIApp) -> ASGIApp:
    async def wrapped(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        await app(scope, receive, send_with_headers)

    return wrapped
