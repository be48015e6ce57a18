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
from recado.queue.connections import asyncpg_connection, connect
from recado.queue.models import Job, JobError, JobStatus, NewJob
from recado.queue.operations import (
    OperationRow,
    OperationStatus,
    cancel_operation,
    get_operation,
    list_operations,
    system,
    tenant,
)
from recado.queue.schedules import ScheduleStatus, list_schedules, pause_schedule, resume_schedule

__all__ = [
    "DeadGroup",
    "Job",
    "JobError",
    "JobStatus",
    "NewJob",
    "OperationRow",
    "OperationStatus",
    "ScheduleStatus",
    "asyncpg_connection",
    "cancel",
    "cancel_operation",
    "connect",
    "dead_by_error",
    "get_job",
    "get_operation",
    "list_errors",
    "list_jobs",
    "list_operations",
    "list_schedules",
    "pause",
    "pause_schedule",
    "requeue",
    "requeue_dead",
    "resume",
    "resume_schedule",
    "server_time",
    "system",
    "tenant",
]
