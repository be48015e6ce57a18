"""Which rights a role needs for what it is for, and the SQL that grants them.

The tables here are the one truth: ``recado grants`` prints them, and :mod:`recado.queue.checks` looks for what is
missing of them. No right stands here that something does not need; the tests take away one after the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum

from recado.errors import ConfigurationError
from recado.queue.limits import shortened
from recado.queue.statements import resolve_schema

MAX_ROLE_BYTES = 63
"""PostgreSQL's NAMEDATALEN less one. It cuts longer names, and may find another role by what is left."""

SELECT = ("SELECT",)
CHANGE = ("SELECT", "INSERT", "UPDATE", "DELETE")

Needs = Mapping[str, tuple[str, ...]]
"""The rights a purpose needs, by table, each as GRANT takes it: ``SELECT``, or ``SELECT (id, queue)`` for columns."""

_INSERTED = "id, job_type, queue, status, run_at, idempotency_key"
"""What an INSERT looks for and returns: not the payloads, which no policy guards."""

_CANCELLED = "status, fence, locked_at, locked_by, updated_at, finished_at"
_REQUEUED = "attempts, reclaims, run_at, result"
_ENDED = "status, error, version, updated_at"

_HUNGRY = ("SELECT (hungry_queues)",)
"""The gate of the NOTIFY."""

ENQUEUE: Needs = {
    "schema_migrations": SELECT,
    "jobs": (f"SELECT ({_INSERTED})", "INSERT"),
    "workers": _HUNGRY,
}

OPERATIONS: Needs = {
    "schema_migrations": SELECT,
    "jobs": (f"SELECT ({_INSERTED}, fence)", "INSERT", f"UPDATE ({_CANCELLED})"),
    "workers": _HUNGRY,
    "operations": ("SELECT", "INSERT", f"UPDATE ({_ENDED})"),
}

WORKER: Needs = {
    "schema_migrations": SELECT,
    "jobs": CHANGE,
    "job_errors": ("INSERT",),
    "workers": CHANGE,
    "queues": SELECT,
    "job_stats": CHANGE,
    "operations": CHANGE,
    "schedules": CHANGE,
    "schedule_holders": ("SELECT", "INSERT"),
}

API: Needs = {
    "schema_migrations": SELECT,
    "jobs": ("SELECT", f"UPDATE ({_CANCELLED}, {_REQUEUED})"),
    "job_errors": SELECT,
    "workers": SELECT,
    "queues": ("SELECT", "INSERT", "UPDATE (paused_at)"),
    "operations": ("SELECT", f"UPDATE ({_ENDED})"),
    "schedules": ("SELECT", "UPDATE (paused_at, last_tick, updated_at)"),
}

PURPOSES: Mapping[str, Needs] = {
    "enqueue jobs": ENQUEUE,
    "start and cancel operations": OPERATIONS,
    "run a worker": WORKER,
    "serve the API": API,
}
"""What roles are for. Each needs USAGE on the schema besides. Reading ``schema_migrations`` is for ``recado check``."""


class Role(StrEnum):
    """Who connects, by the names of ``recado grants --as``."""

    ENQUEUER = "enqueuer"
    """A service that enqueues jobs."""
    OPERATIONS = "operations"
    """A service that starts operations, and shows them to those whose they are."""
    WORKER = "worker"
    API = "api"
    """`recado api`, and the commands that look at jobs and steer them."""


ROLES: Mapping[Role, str] = {
    Role.ENQUEUER: "enqueue jobs",
    Role.OPERATIONS: "start and cancel operations",
    Role.WORKER: "run a worker",
    Role.API: "serve the API",
}
"""The purpose of each, one of :data:`PURPOSES`."""

GRANT_USAGE = "GRANT USAGE ON SCHEMA {schema} TO {role};\n"

GRANT = "GRANT {rights} ON {schema}.{table} TO {role};\n"
"""A right that is held already is granted again without a word, so the script may be run as often as one likes."""


def grants(role: str, purposes: Iterable[Role], *, schema: str | None = None) -> str:
    """The SQL that gives ``role`` what it needs and no more; nothing is executed, and what it holds is not taken away.

    Args:
        role: the name of a role that exists, as PostgreSQL knows it; it is quoted.
        purposes: what the role is for.
        schema: the queue's schema; ``None`` takes the setting's.

    Returns:
        GRANT statements for the tables' owner, one a line, in a fixed order.

    Raises:
        ConfigurationError: ``role`` can be no role's name, or stands for everybody.
    """
    quoted, name = _quoted(role), resolve_schema(schema)
    granted: dict[str, dict[str, dict[str | None, None]]] = {}
    for purpose in purposes:
        for table, rights in PURPOSES[ROLES[purpose]].items():
            for right in rights:
                privilege, columns = columns_of(right)
                granted.setdefault(table, {}).setdefault(privilege, {}).update(dict.fromkeys(columns))
    return GRANT_USAGE.format(schema=name, role=quoted) + "".join(
        GRANT.format(schema=name, table=table, role=quoted, rights=", ".join(map(_right, privileges.items())))
        for table, privileges in granted.items()
    )


def columns_of(right: str) -> tuple[str, list[str | None]]:
    """The privilege of a right of :data:`Needs`, and its columns; ``[None]`` stands for the whole table."""
    privilege, _, columns = right.partition(" ")
    return privilege, [*columns.strip("()").split(", ")] if columns else [None]


def _right(granted: tuple[str, Iterable[str | None]]) -> str:
    privilege, columns = granted
    names = [*columns]
    return privilege if None in names else f"{privilege} ({', '.join(map(str, names))})"


def _quoted(role: str) -> str:
    # PostgreSQL takes "public" for everybody and refuses "none", quoted or not.
    if role in ("public", "none"):
        raise ConfigurationError(f"cannot grant to {role}: that is no role; name the one that a service connects as")
    if not role or not role.isprintable() or len(role.encode()) > MAX_ROLE_BYTES:
        raise ConfigurationError(
            f"cannot grant to {shortened(role)}: a role's name has 1 to {MAX_ROLE_BYTES} bytes, all of them printable; "
            "name the one that a service connects as"
        )
    return '"' + role.replace('"', '""') + '"'
