-- Schedules: one row for each cron entry, and which live worker has it in its code.

CREATE TABLE {schema}.schedules (
    -- The application's name; '' is recado's own, shared by all applications of the schema.
    application text        NOT NULL,
    name        text        NOT NULL,
    -- None: what recado's own ones do is done by the worker that moves the tick.
    job_type    text,
    expression  text        NOT NULL,
    timezone    text        NOT NULL,
    payload     jsonb       NOT NULL,
    overlap     text        NOT NULL,
    -- The digest of the five columns above: what a worker compares with its code.
    definition  text        NOT NULL,
    -- All ticks up to here are settled. It moves in the transaction that enqueues.
    last_tick   timestamptz NOT NULL,
    -- No foreign key: the job may be pruned, and the tick stays.
    last_job_id uuid,
    paused_at   timestamptz,
    created_at  timestamptz NOT NULL DEFAULT now(),
    updated_at  timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT schedules_pkey PRIMARY KEY (application, name),
    CONSTRAINT schedules_job_type_check CHECK ((application = '') = (job_type IS NULL)),
    CONSTRAINT schedules_overlap_check CHECK (overlap IN ('skip', 'queue')),
    CONSTRAINT schedules_times_check CHECK (
        least(last_tick, paused_at, created_at, updated_at) >= '1970-01-01 00:00:00+00'
        AND greatest(last_tick, paused_at, created_at, updated_at) < '9999-12-31 00:00:00+00'
    )
);

-- Goes with its worker: a schedule that no row here names has left the code.
CREATE TABLE {schema}.schedule_holders (
    application text NOT NULL,
    name        text NOT NULL,
    worker_id   uuid NOT NULL,
    definition  text NOT NULL,
    CONSTRAINT schedule_holders_pkey PRIMARY KEY (application, name, worker_id),
    CONSTRAINT schedule_holders_worker_id_fkey FOREIGN KEY (worker_id) REFERENCES {schema}.workers (id) ON DELETE CASCADE
);
