"""The HTTP side: an ASGI application, to be served alone or mounted in another."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.applications import Starlette
from starlette.authentication import AuthenticationBackend, AuthenticationError
from starlette.middleware import Middleware
from starlette.middleware.authentication import AuthenticationMiddleware
from starlette.requests import HTTPConnection, Request
from starlette.responses import JSONResponse
from starlette.routing import Mount, Route, Router

from recado.api import auth
from recado.api.events import Hub
from recado.api.health import healthz, readyz
from recado.api.metrics import metricas, metrics
from recado.api.operations import SCRIPT, Organization, operation_routes
from recado.api.responses import HANDLERS, HEADERS, error_response, with_headers
from recado.app import Recado
from recado.queue.connections import Pool
from recado.settings import Token


def create_app(
    app: Recado,
    pool: Pool,
    *,
    authentication: AuthenticationBackend | None = None,
    tokens: Sequence[Token] | None = None,
    organization: Organization | None = None,
    hub: Hub | None = None,
) -> Starlette:
    """The API of ``app``'s queue, for a server of its own or for ``Mount("/queue", create_app(app, pool))``.

    ``/healthz``, ``/readyz`` and ``/api/recado.js`` are open to all. Everything else demands a user: one of
    ``authentication``'s, the holder of one of ``tokens``, or the user of the application around it. With none of
    these configured only direct requests from this machine are answered. :mod:`recado.api.auth` tells the whole of it.

    Args:
        app: the application whose schema is looked at.
        pool: where the connections come from; it is the caller's to open and to close.
        authentication: the user's own backend, which hands out the scopes ``jobs:admin`` and ``jobs:metrics``.
        tokens: the bearer tokens to accept; ``None`` takes those of ``RECADO_TOKENS``, an empty list none.
        organization: whose operations a request may see, as for
            :func:`~recado.api.operations.operation_routes`.
        hub: tells the open streams of changes, as there.

    Raises:
        ConfigurationError: both ``authentication`` and ``tokens`` are given.
    """
    routes = [
        Route("/api/v1/jobs/metricas", metricas),
        Route("/metrics", metrics),
        *operation_routes(app, pool, organization=organization, hub=hub),
    ]
    protected = Mount(
        "",
        # A redirect to the path without its slash would lead to whatever host the request names.
        app=Router(routes, redirect_slashes=False),
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
        routes=[Route("/healthz", healthz), Route("/readyz", readyz), SCRIPT, protected],
        middleware=[Middleware(with_headers)],
        exception_handlers={**HANDLERS, Exception: _failure},
    )
    api.router.redirect_slashes = False
    api.state.pool = pool
    api.state.schema = app.schema
    return api


def _invalid_credentials(conn: HTTPConnection, error: AuthenticationError) -> JSONResponse:
    # The backend's own words stay out of it: they might quote what was sent.
    return error_response(401, headers={"WWW-Authenticate": auth.INVALID_TOKEN})


async def _failure(request: Request, error: Exception) -> JSONResponse:
    # Starlette raises the error again once this is sent, and the server logs it. This response passes no
    # middleware any more.
    return error_response(500, headers=HEADERS)
