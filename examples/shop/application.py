"""The application that the shop's jobs and operations register with, and what their handlers share."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import asyncpg
from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from examples.shop import emails
from recado import Recado

app = Recado("shop")


class Settings(BaseSettings):
    """What the handlers read from the environment."""

    model_config = SettingsConfigDict(env_prefix="SHOP_")

    dsn: str = Field(default="postgresql:///shop", validation_alias="RECADO_DSN")
    """The queue's database, which is the shop's: only so can an order and its jobs be one transaction."""
    smtp_host: str = "127.0.0.1"
    smtp_port: int = 25
    backup_dir: Path = Path("backups")
    """Where backups go; every worker must see the same folder."""


@app.lifespan
async def lifespan() -> AsyncIterator[Mapping[str, Any]]:
    """What the handlers of one worker process share: each gets it as ``state``."""
    settings = Settings()
    smtp = {"hostname": settings.smtp_host, "port": settings.smtp_port, "local_hostname": emails.DOMAIN}
    async with asyncpg.create_pool(settings.dsn, min_size=0) as pool:
        yield {"pool": pool, "smtp": smtp, "backups": settings.backup_dir}
