"""Who is asking, and whether they may: Starlette's authentication, safe by default.

:func:`backend` chooses, and the first that applies wins:

1. The ``AuthenticationBackend`` given to ``create_app``: any that Starlette takes. Its credentials need the
   scopes of this module, its users an ``is_authenticated``.
2. The tokens given to ``create_app``.
3. The user of the application around, when it has Starlette's ``AuthenticationMiddleware`` itself (or whatever
   else sets ``user`` and ``auth`` in the ASGI scope). Nothing to configure, but its backend must hand out
   ``jobs:admin`` or ``jobs:metrics``: being logged in is not enough.
4. The tokens of ``RECADO_TOKENS``.
5. With none of these, direct requests from this machine only: :class:`LoopbackBackend`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from hmac import compare_digest
from ipaddress import ip_address

from starlette.authentication import (
    AuthCredentials,
    AuthenticationBackend,
    AuthenticationError,
    BaseUser,
)
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Receive, Scope, Send

from recado.errors import ConfigurationError
from recado.settings import DEFAULT_API_HOST, Token, settings

ADMIN = "jobs:admin"
"""The scope to see everything, and to steer it."""

METRICS = "jobs:metrics"
"""The scope to read ``/metrics`` and nothing else: for a scraper, whose configuration many people can read."""

SCOPES = (ADMIN, METRICS)
"""All there are."""

CHALLENGE = 'Bearer realm="recado"'
"""WWW-Authenticate of a request without credentials (RFC 6750, section 3)."""

INVALID_TOKEN = f'{CHALLENGE}, error="invalid_token"'
"""WWW-Authenticate of a request with credentials that are not valid."""

FORWARDING_HEADERS = frozenset({"forwarded", "via", "x-real-ip", "x-client-ip", "true-client-ip", "cf-connecting-ip"})
"""What proxies add to a request they pass on, next to all that begins with ``x-forwarded``."""

_LOOPBACK_HOST = re.compile(r"(localhost|127(\.[0-9]{1,3}){3}|\[::1\])(:[0-9]{1,5})?", re.IGNORECASE)
"""A Host header that names this machine. Not ``*.localhost``: some resolvers ask the network for it."""


@dataclass(frozen=True, slots=True)
class User(BaseUser):
    """Whoever holds a token."""

    name: str
    organization: str | None = None

    @property
    def is_authenticated(self) -> bool:
        return True

    @property
    def display_name(self) -> str:
        return self.name

    @property
    def identity(self) -> str:
        return self.name


class TokenBackend(AuthenticationBackend):
    """Bearer tokens (RFC 6750), of which the server knows the digests only.

    Args:
        tokens: those that are accepted.
    """

    def __init__(self, tokens: Sequence[Token]) -> None:
        self._tokens = [(bytes.fromhex(token.sha256), token) for token in tokens]

    async def authenticate(self, conn: HTTPConnection) -> tuple[AuthCredentials, User] | None:
        """The token's scopes and its user; ``None`` for a request without an Authorization header.

        Raises:
            AuthenticationError: the header holds no token that is accepted.
        """
        match conn.headers.getlist("authorization"):
            case []:
                return None
            case [header]:
                token = self._find(header)
            case _:
                token = None
        if token is None:
            raise AuthenticationError
        return AuthCredentials(sorted(token.scopes)), User(token.name, token.organization)

    def _find(self, header: str) -> Token | None:
        scheme, _, secret = header.partition(" ")
        secret = secret.strip()
        if scheme.lower() != "bearer" or not secret:
            return None
        # Starlette decodes headers as Latin-1, so this gives back the bytes that were sent, whatever they are.
        digest = hashlib.sha256(secret.encode("latin-1")).digest()
        found = None
        for known, token in self._tokens:
            # To the end, also after a hit: the time must not tell which token it was.
            if compare_digest(known, digest):
                found = token
        return found


class LoopbackBackend(AuthenticationBackend):
    """All scopes for a direct request from this machine, and a refusal for any other.

    A client address of this machine proves little: behind a reverse proxy every request has one, and a
    browser here sends what a page from elsewhere makes it send. So, besides the address,

    - the Host header must name this machine: under DNS rebinding it names the attacker's domain;
    - no header may tell of a proxy, and HTTP/1.0, which nginx speaks unless told otherwise, is refused;
    - a browser must not say that another site, or another port here, is behind the request.

    A proxy on this machine that rewrites Host, adds no header and speaks HTTP/1.1 cannot be told from a local
    client. Configure tokens before you put one in front.
    """

    async def authenticate(self, conn: HTTPConnection) -> tuple[AuthCredentials, User]:
        """All scopes.

        Raises:
            HTTPException: 403, since no credentials could help.
        """
        if not _is_direct_and_local(conn):
            raise HTTPException(
                403,
                "cannot answer this request: no tokens are configured, so only direct requests from the server's "
                "own machine are answered; set RECADO_TOKENS",
            )
        return AuthCredentials(SCOPES), User("local")


class OuterUserBackend(AuthenticationBackend):
    """The user that the application around has authenticated already; else, what ``fallback`` says."""

    def __init__(self, fallback: AuthenticationBackend) -> None:
        self._fallback = fallback

    async def authenticate(self, conn: HTTPConnection) -> tuple[AuthCredentials, BaseUser] | None:
        """What stands in the ASGI scope, or the fallback's answer."""
        if "user" in conn.scope and "auth" in conn.scope:
            return conn.auth, conn.user
        return await self._fallback.authenticate(conn)


def backend(
    authentication: AuthenticationBackend | None = None, tokens: Sequence[Token] | None = None
) -> AuthenticationBackend:
    """The backend to authenticate with, as the head of this module tells.

    Raises:
        ConfigurationError: both are given.
    """
    if authentication is not None and tokens is not None:
        raise ConfigurationError(
            "cannot authenticate in two ways: both a backend and tokens are given; pass one of them"
        )
    if authentication is not None:
        return authentication
    if tokens:
        return TokenBackend(tokens)
    if tokens is None and settings().tokens:
        return OuterUserBackend(TokenBackend(settings().tokens))
    return OuterUserBackend(LoopbackBackend())


def check_exposure(host: str, tokens: Sequence[Token]) -> None:
    """Let only an address of this machine pass while no tokens are configured.

    Args:
        host: the address or name the API is about to be bound to.
        tokens: those that are configured.

    Raises:
        ConfigurationError: others could reach the API, and nothing would tell them from its owner.
    """
    if not tokens and host != "localhost" and not _is_loopback(host):
        raise ConfigurationError(
            f"cannot bind to {host or 'all addresses'}: no tokens are configured, so the API answers this machine "
            f"only; make one with `recado token`, or bind to {DEFAULT_API_HOST}"
        )


def require_user(app: ASGIApp) -> ASGIApp:
    """Middleware: whoever is not authenticated gets a 401, whatever they asked for.

    ``requires`` alone would answer 403, and an endpoint that forgot it would answer at all.
    """

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        if not HTTPConnection(scope).user.is_authenticated:
            raise HTTPException(401, headers={"WWW-Authenticate": CHALLENGE})
        await app(scope, receive, send)

    return guarded


def is_from_another_site(conn: HTTPConnection) -> bool:
    """Whether another site's page may be behind a request that a browser sent with its user's cookies.

    Decided as Go's ``http.CrossOriginProtection`` does it: by Sec-Fetch-Site, which no page can set; by Origin against
    Host, in browsers and on connections that do not have it; and what sends neither is no browser. Only the host is
    compared, since behind a proxy the server does not know the scheme.
    """
    if conn.headers.get("authorization", "").lower().startswith("bearer "):
        return False  # no browser adds that by itself, and another site's page must ask before it may
    site = conn.headers.get("sec-fetch-site")
    if site is not None:
        return site not in {"none", "same-origin"}
    origin = conn.headers.get("origin")
    return origin is not None and origin.partition("://")[2] != conn.headers.get("host")


def _is_direct_and_local(conn: HTTPConnection) -> bool:
    return _is_local(conn) and not _is_forwarded(conn) and not _is_cross_origin(conn)


def _is_local(conn: HTTPConnection) -> bool:
    match conn.headers.getlist("host"):
        case [host] if conn.client is not None:
            return _is_loopback(conn.client.host) and _LOOPBACK_HOST.fullmatch(host) is not None
    return False


def _is_forwarded(conn: HTTPConnection) -> bool:
    return conn.scope.get("http_version") == "1.0" or any(
        name in FORWARDING_HEADERS or name.startswith("x-forwarded") for name in conn.headers
    )


def _is_cross_origin(conn: HTTPConnection) -> bool:
    own = f"{conn.scope['scheme']}://{conn.headers['host']}"
    return (
        conn.headers.get("sec-fetch-site", "none") not in {"none", "same-origin"}
        or conn.headers.get("origin", own) != own
    )


def _is_loopback(host: str) -> bool:
    try:
        address = ip_address(host)
    except ValueError:
        return False
    # ::ffff:127.0.0.1 is what a dual-stack socket calls 127.0.0.1; Python's is_loopback knows it from 3.13 on.
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback
