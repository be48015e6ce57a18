"""Everything the environment can say, as ``RECADO_*`` variables."""

from __future__ import annotations

from datetime import timedelta
from functools import lru_cache
from pathlib import Path

from pydantic import BaseModel, Field, SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict

DEFAULT_SCHEMA = "recado"
"""The PostgreSQL schema all tables live in: the project's own name, unlikely to be taken."""

DEFAULT_API_HOST = "127.0.0.1"
"""Loopback: whoever wants the API on a network says so, and configures tokens first."""

DEFAULT_API_PORT = 8710
"""A guess at a port that nothing else on a developer's machine uses."""

DEFAULT_DATA_DIR = Path(".recado")
"""Where the embedded server keeps its data, below the folder ``recado dev`` was called in."""


DEFAULT_EXPIRY_AFTER = timedelta(hours=2)
"""Much longer than any wait of the built-in backoff, and as long as a person may wait for what they started."""

DEFAULT_EXPIRY_SCHEDULE = "*/15 * * * *"
"""Every quarter of an hour: a small part of the two hours."""


class Token(BaseModel):
    """A bearer token the API accepts; the secret itself is never stored, only its digest."""

    name: str = Field(min_length=1)
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    """The SHA-256 of the secret, as 64 hexadecimal digits."""
    scopes: frozenset[str] = frozenset()
    organization: str | None = None


class Settings(BaseSettings):
    """Read from ``RECADO_DSN``, ``RECADO_SCHEMA`` and so on; command-line options take precedence."""

    model_config = SettingsConfigDict(
        env_prefix="RECADO_", env_ignore_empty=True, extra="ignore", populate_by_name=True
    )

    dsn: SecretStr | None = None
    """Where the queue lives, as a ``postgresql://`` URL."""
    listen_dsn: SecretStr | None = None
    """A direct URL for LISTEN, where ``dsn`` goes through a transaction-mode pooler."""
    schema_name: str = Field(default=DEFAULT_SCHEMA, alias="RECADO_SCHEMA")
    expiry_after: timedelta = DEFAULT_EXPIRY_AFTER
    """Without news for so long an operation is taken for interrupted. Seconds, or ISO 8601: ``PT2H``."""
    expiry_schedule: str = DEFAULT_EXPIRY_SCHEDULE
    """When that is looked for, as a cron expression."""
    tokens: tuple[Token, ...] = ()
    """A JSON list, as ``recado token`` prints its entries."""
    api_host: str = DEFAULT_API_HOST
    api_port: int = Field(default=DEFAULT_API_PORT, ge=1, le=65535)
    data_dir: Path = DEFAULT_DATA_DIR
    pg_bin: Path | None = None
    """A folder with ``postgres`` and ``initdb``; else the wheel's, else the system's."""


@lru_cache(maxsize=1)
def settings() -> Settings:
    """The environment's settings, read once."""
    return Settings()
