"""The roles that the shop connects as: neither owns a table, and each may do what it has to and no more.

Row-level security holds for them. It would not for the superuser that an embedded server comes with.
"""

from __future__ import annotations

from typing import NamedTuple
from urllib.parse import urlsplit

from examples.shop.application import app
from recado.queue.connections import Connection
from recado.queue.grants import Role, grants

WEB, WORKER = "shop_web", "shop_worker"

SELECT_ROLE = "SELECT EXISTS (SELECT FROM pg_roles WHERE rolname = $1)"

CREATE_ROLE = "CREATE ROLE {role} LOGIN NOSUPERUSER NOBYPASSRLS"


class Rights(NamedTuple):
    """What a role of the shop's may do."""

    queue: tuple[Role, ...]
    """What it does with the queue; recado knows the rights for that."""
    own: str
    """The rights to what is the shop's own."""


RIGHTS = {
    WEB: Rights(
        (Role.OPERATIONS, Role.API),
        """
        GRANT USAGE ON SCHEMA shop TO {role};
        GRANT SELECT ON ALL TABLES IN SCHEMA shop TO {role};
        GRANT INSERT ON shop.orders, shop.payment_events TO {role};
        GRANT INSERT, DELETE ON shop.uploads TO {role};
        """,
    ),
    WORKER: Rights(
        (Role.WORKER, Role.API),
        """
        GRANT USAGE ON SCHEMA shop TO {role};
        GRANT SELECT ON ALL TABLES IN SCHEMA shop TO {role};
        GRANT INSERT ON shop.ledger TO {role};
        GRANT DELETE ON shop.uploads TO {role};
        GRANT INSERT, UPDATE, DELETE ON shop.blueprints, shop.racks, shop.backups TO {role};
        """,
    ),
}
"""The web service enqueues, cancels, and serves the queue's API; the worker does what workers do and what the handlers
do, and its connections also count what there is for the report."""


async def create(conn: Connection) -> None:
    """Create the roles that are missing, and grant them their rights; as an administrator, once the tables are there.

    They have no password: the embedded server lets in whoever reaches its socket, which is closed to other accounts.
    """
    for role, rights in RIGHTS.items():
        if not await conn.fetchval(SELECT_ROLE, role):
            await conn.execute(CREATE_ROLE.format(role=role))
        await grant(conn, role, rights)


async def grant(conn: Connection, role: str, rights: Rights) -> None:
    """Give one of the :data:`RIGHTS` to a role."""
    await conn.execute(grants(role, rights.queue, schema=app.schema))
    await conn.execute(rights.own.format(role=role))


def url(dsn: str, role: str) -> str:
    """The URL ``dsn`` for another role, without a password."""
    parts = urlsplit(dsn)
    return parts._replace(netloc=f"{role}@{parts.netloc.rpartition('@')[2]}").geturl()
