"""Operations over HTTP: what a browser polls, streams and cancels while a long job runs."""

from __future__ import annotations

import hashlib
import re
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import NoReturn, TypeAlias
from uuid import UUID

from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from recado.api.auth import is_from_another_site
from recado.api.events import EventStream, Hub, as_json, as_tenant, own_operation
from recado.api.responses import HANDLERS, error_response, with_headers
from recado.app import Recado
from recado.errors import IllegalTransition, OperationNotFound, TenantError
from recado.queue.connections import Pool
from recado.queue.limits import MAX_NAME_LENGTH, shortened
from recado.queue.operations import (
    PAGE_SIZE,
    Cursor,
    OperationRow,
    OperationStatus,
    OrganizationId,
    cancel_operation,
    check_organization,
    list_operations,
)

RETRY_AFTER = 1
"""Seconds after which whoever polls may ask for the first time; most of what takes longer has begun by then."""

MAX_PAGE_SIZE = 200
"""Operations of a page at most: their results have 256 KiB at most each, and a list shows few."""

SCRIPT_MAX_AGE = 3600
"""Seconds for which a browser does not ask for the script again: the longest that a page runs an older one."""

_KIND = re.compile(rf"[a-z0-9_-]{{1,{MAX_NAME_LENGTH}}}")
_LIMIT = re.compile(r"[1-9][0-9]{0,2}")
_EVENT_ID = re.compile(r"[0-9]{1,10}")

Organization: TypeAlias = Callable[[Request], OrganizationId | None]
"""Says whose operations a request may see; ``None`` for nobody's."""


def accepted(job_id: UUID, *, prefix: str = "") -> JSONResponse:
    """The answer to a request that started an operation: 202, and where to look (RFC 9110, section 15.3.3).

    Args:
        job_id: as ``start_operation`` returned it.
        prefix: where the operations' routes are mounted, such as "/queue"; the root unless it is given.
    """
    headers = {"Location": f"{prefix}/api/jobs/{job_id}", "Retry-After": str(RETRY_AFTER)}
    return JSONResponse({"job_id": str(job_id)}, 202, headers)


def user_organization(request: Request) -> OrganizationId | None:
    """The ``organization_id`` of the user whom Starlette's authentication found, or else the ``organization``.

    Raises:
        HTTPException: 401, there is no such user.
    """
    user = request.scope.get("user")
    if user is None or not user.is_authenticated:
        raise HTTPException(401, "cannot answer this request: nobody is logged in; log in first")
    organization_id: OrganizationId | None = getattr(user, "organization_id", None)
    return getattr(user, "organization", None) if organization_id is None else organization_id


def operation_routes(
    app: Recado, pool: Pool, *, organization: Organization | None = None, hub: Hub | None = None
) -> list[Route]:
    """The routes below ``/api/jobs`` and ``/api/recado.js``, for an application that authenticates by itself::

        routes = [Route("/imports", start_import, methods=["POST"]), *operation_routes(app, pool)]

    They need a user, but no scope; :func:`~recado.api.create_app` has them, too.

    Args:
        app: the application whose operations these are.
        pool: where the connections come from; its role must not bypass row-level security.
        organization: whose operations a request may see; :func:`user_organization` unless it is given.
        hub: tells the open streams of changes; one of these routes' own unless it is given. Routes that share one
            share its connection, and whoever has it can ``stop()`` the streams.
    """
    endpoints = _Endpoints(pool, app.schema, organization or user_organization, hub or Hub(app, pool))
    # The application around may answer exceptions otherwise; whatever it does, these have to be answered alike.
    middleware = [Middleware(with_headers), Middleware(ExceptionMiddleware, handlers=_HANDLERS)]
    return [
        SCRIPT,
        Route("/api/jobs", endpoints.page, middleware=middleware),
        Route("/api/jobs/{job_id}", endpoints.get, middleware=middleware),
        Route("/api/jobs/{job_id}/events", endpoints.events, middleware=middleware),
        Route("/api/jobs/{job_id}/cancel", endpoints.cancel, methods=["POST"], middleware=middleware),
    ]


class _Endpoints:
    def __init__(self, pool: Pool, schema: str, organization: Organization, hub: Hub) -> None:
        self._pool = pool
        self._schema = schema
        self._organization = organization
        self._hub = hub

    async def page(self, request: Request) -> JSONResponse:
        organization_id = self._whose(request)
        query = request.query_params
        kind, status, limit, before = _kind(query), _status(query), _limit(query), _cursor(query)
        async with as_tenant(self._pool, organization_id) as conn:
            found = await list_operations(
                conn, organization_id, kind=kind, status=status, before=before, limit=limit + 1, schema=self._schema
            )
        page = found[:limit]
        return JSONResponse(
            {"jobs": [as_json(operation) for operation in page], "next": _end(page[-1]) if found[limit:] else None}
        )

    async def get(self, request: Request) -> JSONResponse:
        organization_id, job_id = self._whose(request), _job_id(request)
        async with as_tenant(self._pool, organization_id) as conn:
            operation = await own_operation(conn, organization_id, job_id, schema=self._schema)
        return JSONResponse(as_json(operation))

    async def events(self, request: Request) -> EventStream:
        seen = request.headers.get("last-event-id", "")
        return EventStream(
            self._hub,
            self._whose(request),
            _job_id(request),
            int(seen) if _EVENT_ID.fullmatch(seen) else None,
        )

    async def cancel(self, request: Request) -> JSONResponse:
        # It needs no body and no header of its own, so any page could have a browser send it by a form, with the
        # cookies of whoever is logged in there. Where credentials are cookies, the browser's word on who asks is
        # what stands against that; SameSite, if they have it, does not guard against other hosts of the same site.
        if is_from_another_site(request):
            raise HTTPException(
                403,
                "cannot cancel: another site's page may have sent this request; send it from a page of this host, "
                "or with a bearer token",
            )
        organization_id, job_id = self._whose(request), _job_id(request)
        async with as_tenant(self._pool, organization_id) as conn:
            await own_operation(conn, organization_id, job_id, schema=self._schema)
            operation = await cancel_operation(conn, job_id, schema=self._schema)
        return JSONResponse(as_json(operation))

    def _whose(self, request: Request) -> str:
        organization_id = self._organization(request)
        if organization_id is None:
            raise HTTPException(
                403,
                "cannot answer this request: its user belongs to no organization; use the credentials of one who does",
            )
        return check_organization(organization_id)


async def _script(request: Request) -> Response:
    headers = {"ETag": _SCRIPT_TAG, "Cache-Control": f"public, max-age={SCRIPT_MAX_AGE}"}
    if request.headers.get("if-none-match") == _SCRIPT_TAG:
        return Response(status_code=304, headers=headers)
    return Response(_SCRIPT_TEXT, media_type="text/javascript", headers=headers)


_SCRIPT_TEXT = (Path(__file__).parent / "static" / "recado.js").read_bytes()
_SCRIPT_TAG = f'"{hashlib.sha256(_SCRIPT_TEXT).hexdigest()[:16]}"'

SCRIPT = Route("/api/recado.js", _script, middleware=[Middleware(with_headers)])
"""The browser's side, open to all: it holds no secret, and a script tag sends no token."""


# --- what stands in a request ---


def _job_id(request: Request) -> UUID:
    try:
        return UUID(request.path_params["job_id"])
    except ValueError:
        raise HTTPException(404) from None


def _kind(query: Mapping[str, str]) -> str | None:
    kind = query.get("kind") or None
    if kind is not None and not _KIND.fullmatch(kind):
        _refuse_page(f"kind is {shortened(kind)}", "give the name of a kind of operation")
    return kind


def _status(query: Mapping[str, str]) -> OperationStatus | None:
    status = query.get("status") or None
    try:
        return None if status is None else OperationStatus(status)
    except ValueError:
        _refuse_page(f"status is {shortened(status)}", f"give one of {', '.join(OperationStatus)}")


def _limit(query: Mapping[str, str]) -> int:
    limit = query.get("limit") or str(PAGE_SIZE)
    if not _LIMIT.fullmatch(limit) or int(limit) > MAX_PAGE_SIZE:
        _refuse_page(f"limit is {shortened(limit)}", f"give a whole number from 1 to {MAX_PAGE_SIZE}")
    return int(limit)


def _end(operation: OperationRow) -> str:
    """The cursor to go on from after ``operation``."""
    text = f"{operation.created_at.isoformat()}|{operation.job_id}"
    return urlsafe_b64encode(text.encode()).decode().rstrip("=")


def _cursor(query: Mapping[str, str]) -> Cursor | None:
    cursor = query.get("cursor") or None
    if cursor is None:
        return None
    try:
        text = urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)).decode()
        created_at, _, job_id = text.partition("|")
        # Years that are none in UTC would fail only in the driver.
        return Cursor(datetime.fromisoformat(created_at).astimezone(UTC), UUID(job_id))
    except (ValueError, OverflowError):
        _refuse_page(f"cursor is {shortened(cursor)}", "give what was the next of the page before, or none")


def _refuse_page(reason: str, remedy: str) -> NoReturn:
    raise HTTPException(400, f"cannot list operations: {reason}; {remedy}")


# --- how the queue's errors are answered ---


async def _not_found(request: Request, error: Exception) -> Response:
    # As to any other address where there is nothing: who asks does not learn whether somebody else has it.
    return error_response(404)


async def _refused(request: Request, error: Exception) -> Response:
    return error_response(409, str(error))


async def _no_tenant(request: Request, error: Exception) -> Response:
    return error_response(403, str(error))


_HANDLERS = MappingProxyType(
    {**HANDLERS, OperationNotFound: _not_found, IllegalTransition: _refused, TenantError: _no_tenant}
)
