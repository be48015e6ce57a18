"""Who is logged in: a DEMONSTRATION, in which anybody may be anybody.

There are three users and no passwords, so the shop listens on this machine only. What a real service would keep is
the rest: the user and the organization come from a signed cookie and never from the request, other sites' pages can
neither send requests in the user's name nor, under a name of theirs for this address, read the answers.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass

from starlette.authentication import AuthCredentials, AuthenticationBackend, BaseUser
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection, Request
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from recado.api.auth import is_from_another_site

COOKIE = "shop_user"

HOSTS = ["127.0.0.1", "localhost"]
"""The names a browser may know the shop by; under any other it is a page from elsewhere whose name leads here."""

SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})


@dataclass(frozen=True, slots=True)
class User(BaseUser):
    """Somebody who plans machine rooms; recado asks for the ``organization_id``."""

    name: str
    full_name: str
    organization_id: str

    @property
    def is_authenticated(self) -> bool:
        return True

    @property
    def display_name(self) -> str:
        return self.full_name

    @property
    def identity(self) -> str:
        return self.name


USERS = {
    user.name: user
    for user in (
        User("ada", "Ada Lovelace", "analytical-engines"),
        User("grace", "Grace Hopper", "compilers-inc"),
        User("robot", "The Robot", "automata"),
    )
}
"""The robot is who ``make run`` works as."""


class CookieBackend(AuthenticationBackend):
    """Knows users by the cookie that :func:`log_in` gave them.

    Args:
        secret: what cookies are signed with; another one logs everybody out.
    """

    def __init__(self, secret: str) -> None:
        self._secret = secret

    async def authenticate(self, conn: HTTPConnection) -> tuple[AuthCredentials, User] | None:
        """The user; ``None`` without a cookie, or with one that is not ours."""
        name, _, signature = conn.cookies.get(COOKIE, "").partition(".")
        # Bytes, since compare_digest refuses text that is not ASCII.
        if name not in USERS or not hmac.compare_digest(signature.encode(), sign(name, self._secret).encode()):
            return None
        return AuthCredentials(["authenticated"]), USERS[name]


def sign(name: str, secret: str) -> str:
    """The signature of a user's name."""
    return hmac.new(secret.encode(), name.encode(), hashlib.sha256).hexdigest()


async def log_in(request: Request) -> Response:
    """Be one of :data:`USERS`: ``POST /login`` with ``user=ada``."""
    async with request.form(max_files=0, max_fields=1) as form:
        name = str(form.get("user", ""))
    if name not in USERS:
        raise HTTPException(400, f"cannot log in: there is no such user; choose one of {', '.join(USERS)}")
    response = RedirectResponse("/blueprints", 303)
    # Not `secure`: on this machine the shop speaks plain HTTP.
    cookie = f"{name}.{sign(name, request.app.state.session_secret)}"
    response.set_cookie(COOKIE, cookie, httponly=True, samesite="strict")
    return response


async def log_out(request: Request) -> Response:
    """Be nobody."""
    response = RedirectResponse("/blueprints", 303)
    response.delete_cookie(COOKIE, httponly=True, samesite="strict")
    return response


def current_user(request: Request) -> User:
    """Who asks.

    Raises:
        HTTPException: 401, nobody is logged in.
    """
    if not isinstance(request.user, User):
        raise HTTPException(401, "cannot answer this request: nobody is logged in; log in at /blueprints")
    return request.user


def own_pages_only(app: ASGIApp) -> ASGIApp:
    """Middleware: what changes something must not come from another site's page.

    The cookie is ``SameSite=Strict``, but another port of this machine is the same site.
    """

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] not in SAFE_METHODS and is_from_another_site(HTTPConnection(scope)):
            raise HTTPException(403, "cannot answer this request: another site's page sent it; send it from ours")
        await app(scope, receive, send)

    return guarded
