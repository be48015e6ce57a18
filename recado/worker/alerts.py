"""The death of a job, told to people."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from recado.app import JOB_DIED, JobDied, Recado
from recado.queue.connections import Connection
from recado.queue.enqueue import insert_jobs
from recado.queue.finishes import Failed
from recado.queue.leases import Reclaimed
from recado.queue.models import DEFAULT_QUEUE, NewJob

logger = logging.getLogger("recado.worker")


async def raise_alerts(conn: Connection, app: Recado, dead: Iterable[tuple[Failed | Reclaimed, str]]) -> None:
    """Log the death of jobs, and enqueue ``recado.job_died`` for critical ones.

    The alert is a job itself, with retries of its own, and is inserted in the transaction in which the job
    dies: it cannot be lost between the two.

    Args:
        dead: each job that died, with the class of its last error.
    """
    alerts = []
    for job, error_class in dead:
        # By the row, as whoever enqueued it said, since this worker may not know the type; and by the registry,
        # for rows that were inserted by hand.
        job_type = app.job_types.get(job.job_type)
        critical = job.critical or (job_type is not None and job_type.critical)
        logger.log(
            logging.CRITICAL if critical else logging.ERROR,
            "%sjob %s (%s) is dead, attempts failed: %d, the last by %s",
            "critical " if critical else "",
            job.id,
            job.job_type,
            job.attempts,
            error_class,
        )
        if critical:
            alerts.append(_alert(app, job, error_class))
    if alerts:
        await insert_jobs(conn, alerts, schema=app.schema)


def _alert(app: Recado, job: Failed | Reclaimed, error_class: str) -> NewJob:
    job_type = app.job_types[JOB_DIED]
    payload = JobDied(
        job_id=job.id, job_type=job.job_type, queue=job.queue, attempts=job.attempts, error_class=error_class
    )
    return NewJob(
        job_type=JOB_DIED,
        # Not validated by the handler's annotation, which is the application's own: should it ask for something
        # else, the alert fails like any job. It must not keep the death from being written down.
        payload=payload.model_dump_json(),
        # Unless its handler was given a queue of its own, the alert goes to the dead job's: that one is served
        # by some worker, which of the default queue nobody knows.
        queue=job.queue if job_type.queue == DEFAULT_QUEUE else job_type.queue,
        priority=job_type.priority,
        max_attempts=job_type.max_attempts,
        idempotency_key=f"{job.id}:{job.fence}",
    )
