"""The application that worker processes load in these tests; what its handlers do is written into a file."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import asyncpg

from recado import ClaimedJob, Operation, Recado

app = Recado()


def note(job: ClaimedJob, what: str) -> None:
    """One line, by one write: lines of several processes do not mix."""
    fd = os.open(os.environ["HANDLED"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(fd, f"{job.id} {what} {os.getpid()}\n".encode())
    finally:
        os.close(fd)


@app.job("chaos.quick")
async def quick(payload: Any, job: ClaimedJob) -> None:
    await asyncio.sleep(0)
    note(job, "quick")


@app.job("chaos.books")
async def books(payload: Any, job: ClaimedJob, conn: asyncpg.Connection) -> None:
    await conn.execute("INSERT INTO public.effects VALUES ($1)", job.id)
    note(job, "books")


@app.job("chaos.hangs")
async def hangs(payload: Any, job: ClaimedJob) -> str:
    """The first attempt never ends by itself; a later one does."""
    note(job, f"fence{job.fence}")
    if job.fence == 1:
        await asyncio.sleep(float(os.environ.get("HANG", "3600")))
    return f"fence {job.fence}"


@app.operation("endless")
async def endless(payload: Any, operation: Operation) -> None:
    await operation.progress(40)
    await asyncio.Event().wait()
