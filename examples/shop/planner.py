"""The planner, as its users see it: a page, what it starts, and the operations it watches."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path, PurePath
from uuid import UUID

from pydantic import TypeAdapter, ValidationError
from starlette.datastructures import Headers, UploadFile
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.middleware import Middleware
from starlette.middleware.authentication import AuthenticationMiddleware
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.templating import Jinja2Templates

from examples.shop import blueprints
from examples.shop.accounts import (
    HOSTS,
    USERS,
    CookieBackend,
    User,
    current_user,
    log_in,
    log_out,
    own_pages_only,
)
from examples.shop.analysis import Analysis, analyze_blueprint
from examples.shop.application import app
from examples.shop.backups import Restore, back_up, list_backups, restore
from examples.shop.blueprints import MAX_UPLOAD, list_blueprints
from recado import accepted, tenant
from recado.api import Hub, operation_routes
from recado.queue.connections import Pool

PAGES = Path(__file__).with_name("pages")

HEADERS = {
    # Scripts, styles and requests are this host's; nothing but an empty icon stands in the page itself, and nobody
    # frames it.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
}

MULTIPART_OVERHEAD = 4096
"""Bytes around the file in a form: boundaries, headers, and the other field."""

templates = Jinja2Templates(PAGES)

_name: TypeAdapter[str] = TypeAdapter(blueprints.Name)


def planner(pool: Pool, *, session_secret: str, hub: Hub) -> Mount:
    """Everything for users who are logged in, and the login."""
    return Mount(
        "",
        routes=[
            Route("/blueprints", page),
            Route("/blueprints.js", script),
            Route("/blueprints.css", stylesheet),
            Route("/login", log_in, methods=["POST"]),
            Route("/logout", log_out, methods=["POST"]),
            Route("/blueprints/import", import_file, methods=["POST"]),
            Route("/blueprints/{blueprint_id:uuid}/analysis", start_analysis, methods=["POST"]),
            Route("/backups", start_backup, methods=["POST"]),
            Route("/backups/{backup_id:uuid}/restore", start_restore, methods=["POST"]),
            *operation_routes(app, pool, hub=hub),
        ],
        middleware=[
            Middleware(TrustedHostMiddleware, allowed_hosts=HOSTS),
            Middleware(ExceptionMiddleware, handlers={HTTPException: _error}),
            Middleware(own_pages_only),
            Middleware(AuthenticationMiddleware, backend=CookieBackend(session_secret)),
        ],
    )


async def page(request: Request) -> Response:
    """The organization's blueprints and backups, and forms for all that can be done; for nobody, the login."""
    if not isinstance(request.user, User):
        return templates.TemplateResponse(request, "login.html", {"users": USERS.values()}, headers=HEADERS)
    organization_id = request.user.organization_id
    async with tenant(request.app.state.pool, organization_id) as conn:
        context = {
            "user": request.user,
            "example": blueprints.EXAMPLE,
            "blueprints": await list_blueprints(conn, organization_id),
            "backups": await list_backups(conn, organization_id),
        }
    return templates.TemplateResponse(request, "blueprints.html", context, headers=HEADERS)


async def script(request: Request) -> Response:
    """What drives the page."""
    return FileResponse(PAGES / "blueprints.js", media_type="text/javascript", headers=HEADERS)


async def stylesheet(request: Request) -> Response:
    """How the page looks."""
    return FileResponse(PAGES / "blueprints.css", headers=HEADERS)


async def import_file(request: Request) -> Response:
    """Take a CSV file, as a form's ``file`` or as a body of ``text/csv``, and start its import in the transaction
    that keeps it: there is no upload without an import to come."""
    user = current_user(request)
    name, content = await _uploaded(request)
    async with tenant(request.app.state.pool, user.organization_id) as conn:
        job_id = await blueprints.upload(conn, user.organization_id, name, content, created_by=user.identity)
    return accepted(job_id)


async def start_analysis(request: Request) -> Response:
    """Analyze a blueprint. Whether it exists, and is the organization's, the operation finds out."""
    user = current_user(request)
    blueprint_id: UUID = request.path_params["blueprint_id"]
    async with tenant(request.app.state.pool, user.organization_id) as conn:
        job_id = await analyze_blueprint.start(conn, Analysis(blueprint_id=blueprint_id), created_by=user.identity)
    return accepted(job_id)


async def start_backup(request: Request) -> Response:
    """Back up what the organization has."""
    user = current_user(request)
    async with tenant(request.app.state.pool, user.organization_id) as conn:
        job_id = await back_up.start(conn, None, created_by=user.identity)
    return accepted(job_id)


async def start_restore(request: Request) -> Response:
    """Put a backup back."""
    user = current_user(request)
    backup_id: UUID = request.path_params["backup_id"]
    async with tenant(request.app.state.pool, user.organization_id) as conn:
        job_id = await restore.start(conn, Restore(backup_id=backup_id), created_by=user.identity)
    return accepted(job_id)


async def _uploaded(request: Request) -> tuple[str, bytes]:
    """The blueprint's name, and the file.

    Raises:
        HTTPException: it is too large, or not there.
    """
    match request.headers.get("content-type", "").partition(";")[0].strip().lower():
        case "text/csv":
            return _checked_name(request.query_params.get("name", "")), await _body(request, MAX_UPLOAD)
        case "multipart/form-data":
            return await _from_form(request.headers, await _body(request, MAX_UPLOAD + MULTIPART_OVERHEAD))
    raise HTTPException(415, "cannot import: this is neither text/csv nor a form with a file; send one of these")


async def _from_form(headers: Headers, body: bytes) -> tuple[str, bytes]:
    async def chunks() -> AsyncGenerator[bytes, None]:
        yield body

    try:
        form = await MultiPartParser(headers, chunks(), max_files=1, max_fields=1).parse()
    except MultiPartException as error:
        raise HTTPException(400, f"cannot import: {error.message.rstrip('.')}; send the form again") from None
    try:
        file = form.get("file")
        if not isinstance(file, UploadFile) or not file.filename:
            raise HTTPException(400, "cannot import: there is no file; choose one")
        return _checked_name(str(form.get("name") or PurePath(file.filename).stem)), await file.read()
    finally:
        await form.close()


async def _body(request: Request, limit: int) -> bytes:
    """The body. It is counted as it comes, since what it says of its length may be wrong."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > limit:
            raise HTTPException(413, f"cannot import: the file is larger than {MAX_UPLOAD // 1024} KiB; split it")
    return bytes(body)


def _checked_name(name: str) -> str:
    try:
        return _name.validate_python(name)
    except ValidationError:
        raise HTTPException(
            400, "cannot import: the blueprint has no name of 1 to 100 printable characters; send one"
        ) from None


async def _error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return JSONResponse({"error": error.detail}, error.status_code, {**HEADERS, **(error.headers or {})})
