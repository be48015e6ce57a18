"""How a statement finds its schema.

Each statement of :mod:`recado.queue` is a constant with ``{schema}`` in it. :func:`fill` puts the name in,
once per statement and schema: a name that could be anything but an identifier never gets that far.
"""

from __future__ import annotations

import re
from functools import lru_cache

from recado.errors import ConfigurationError
from recado.queue.limits import shortened
from recado.settings import settings

_SCHEMA_NAME = re.compile(r"[a-z_][a-z0-9_]{0,47}")
"""Lower case needs no quoting; 48 characters leave room for a suffix in the 63 of a NOTIFY channel's name."""


def resolve_schema(schema: str | None) -> str:
    """The schema to work in: ``schema``, or ``RECADO_SCHEMA``, or ``recado``.

    Raises:
        ConfigurationError: the name is not a plain lower-case identifier of at most 48 characters.
    """
    return _checked(settings().schema_name if schema is None else schema)


@lru_cache(maxsize=64)
def _checked(schema: str) -> str:
    if not isinstance(schema, str) or not _SCHEMA_NAME.fullmatch(schema) or schema.startswith("pg_"):
        raise ConfigurationError(
            f"cannot use {shortened(schema)} as the schema's name: it must be a lower-case identifier of at most 48 "
            "characters that does not begin with pg_; choose another, or unset RECADO_SCHEMA"
        )
    return schema


def fill(statement: str, schema: str | None) -> str:
    """``statement`` with the schema's name in place of ``{schema}``."""
    return _filled(statement, resolve_schema(schema))


@lru_cache(maxsize=512)
def _filled(statement: str, schema: str) -> str:
    return statement.replace("{schema}", schema)


def wake_channel(schema: str | None) -> str:
    """The NOTIFY channel on which a queue's name says that there is work in it."""
    return resolve_schema(schema)


def cancel_channel(schema: str | None) -> str:
    """The NOTIFY channel on which a running job's id says that it was cancelled."""
    return f"{resolve_schema(schema)}_cancel"


WOKEN = """woken AS (
    SELECT pg_notify('{schema}', queue)
    FROM (
        SELECT DISTINCT queue FROM changed
        WHERE status = 'pending' AND run_at <= clock_timestamp() + interval '3 seconds'
    ) AS q
    WHERE EXISTS (SELECT FROM {schema}.workers w WHERE q.queue = ANY (w.hungry_queues))
)"""
"""The gated NOTIFY of every statement that makes jobs pending: once for each queue among the rows of
``changed`` that are due before a sleeping worker's next poll, and only while a worker is hungry there.
The statement has to read ``woken`` somewhere, or PostgreSQL leaves it out."""

BOUNDED = """set_config('idle_in_transaction_session_timeout', '5s', true),
       CASE WHEN current_setting('transaction_timeout', true) IS NOT NULL
            THEN set_config('transaction_timeout', '15s', true) END"""
"""Columns that let the server end this transaction, and with it its locks, when its client falls silent: a process that
is stopped, or whose network is cut, right between two statements. The first timeout does not count while the client has
prepared a statement and not yet sent its arguments (asyncpg ends a Parse with Flush, so the server takes itself for
active); the second, of PostgreSQL 17 and newer, does. A stopped worker that held a lock there kept all others from
their sweeps for as long as it was stopped. Ours take milliseconds."""
