"""The database side: every SQL statement of the project, each in one place.

All functions take the connection first and never commit: whoever owns the connection owns the transaction.
What services and operators call is exported here; the workers' own statements stay in their modules.
"""

from recado.queue.admin import (
    DeadGroup,
    cancel,
    dead_by_error,
    get_job,
    list_errors,
    list_jobs,
    pause,
    requeue,
    requeue_dead,
    resume,
    server_time,
)
from recado.queue.connections import asyncpg_connection
from recado.queue.models import Job, JobError, JobStatus, NewJob

__all__ = [
    "DeadGroup",
    "Job",
    "JobError",
    "JobStatus",
    "NewJob",
    "asyncpg_connection",
    "cancel",
    "dead_by_error",
    "get_job",
    "list_errors",
    "list_jobs",
    "pause",
    "requeue",
    "requeue_dead",
    "resume",
    "server_time",
]
