-- The queue: jobs, what went wrong with them, who works on them, and what may be paused.
-- No extension, no function, no trigger, no default for the id: ids are UUIDv7, made by whoever inserts.

CREATE TABLE {schema}.jobs (
    id              uuid        NOT NULL,
    job_type        text        NOT NULL,
    queue           text        NOT NULL DEFAULT 'default',
    priority        smallint    NOT NULL DEFAULT 1,
    payload         jsonb       NOT NULL,
    status          text        NOT NULL DEFAULT 'pending',
    attempts        smallint    NOT NULL DEFAULT 0,
    max_attempts    smallint    NOT NULL DEFAULT 5,
    reclaims        smallint    NOT NULL DEFAULT 0,
    critical        boolean     NOT NULL DEFAULT false,
    fence           integer     NOT NULL DEFAULT 0,
    run_at          timestamptz NOT NULL DEFAULT now(),
    locked_at       timestamptz,
    locked_by       uuid,
    last_error      text,
    idempotency_key text,
    result          jsonb,
    metadata        jsonb       NOT NULL DEFAULT '{}',
    created_at      timestamptz NOT NULL DEFAULT now(),
    updated_at      timestamptz NOT NULL DEFAULT now(),
    finished_at     timestamptz,
    CONSTRAINT jobs_pkey PRIMARY KEY (id),
    CONSTRAINT jobs_status_check CHECK (status IN ('pending', 'running', 'completed', 'dead', 'cancelled')),
    CONSTRAINT jobs_priority_check CHECK (priority BETWEEN 0 AND 3),
    CONSTRAINT jobs_attempts_check CHECK (attempts BETWEEN 0 AND max_attempts AND max_attempts > 0),
    -- The span Python's datetime can hold with any time zone: a row outside it could not be read back,
    -- and would wedge every claim that meets it.
    CONSTRAINT jobs_run_at_check CHECK (run_at >= '1970-01-01 00:00:00+00' AND run_at < '9999-12-31 00:00:00+00'),
    -- The same for what only lists read, here and in the other tables: one such row would break each list it is in.
    CONSTRAINT jobs_times_check CHECK (
        least(created_at, updated_at, locked_at, finished_at) >= '1970-01-01 00:00:00+00'
        AND greatest(created_at, updated_at, locked_at, finished_at) < '9999-12-31 00:00:00+00'
    )
) WITH (
    -- Every job leaves two dead versions behind at least; the defaults would let them pile up to a fifth of the table.
    autovacuum_vacuum_scale_factor = 0.01,
    autovacuum_vacuum_insert_scale_factor = 0.01,
    autovacuum_analyze_scale_factor = 0.01,
    autovacuum_vacuum_cost_delay = 0
);

-- The claim. `id` keeps jobs of one transaction, which share their run_at, first in, first out.
CREATE INDEX jobs_claim_idx ON {schema}.jobs (queue, priority, run_at, id) WHERE status = 'pending';
-- The sweep for orphans.
CREATE INDEX jobs_running_idx ON {schema}.jobs (locked_at) WHERE status = 'running';
CREATE UNIQUE INDEX jobs_idempotency_key_idx ON {schema}.jobs (job_type, idempotency_key)
    WHERE idempotency_key IS NOT NULL;
-- The dead letter list, newest first.
CREATE INDEX jobs_dead_idx ON {schema}.jobs (finished_at, id) WHERE status = 'dead';

-- One row per attempt that failed. The fence names the attempt: it moves at every claim.
CREATE TABLE {schema}.job_errors (
    job_id      uuid        NOT NULL,
    fence       integer     NOT NULL,
    attempt     smallint    NOT NULL,
    worker_id   uuid,
    started_at  timestamptz,
    ended_at    timestamptz NOT NULL DEFAULT now(),
    error_class text        NOT NULL,
    message     text        NOT NULL,
    traceback   text,
    CONSTRAINT job_errors_pkey PRIMARY KEY (job_id, fence),
    CONSTRAINT job_errors_job_id_fkey FOREIGN KEY (job_id) REFERENCES {schema}.jobs (id) ON DELETE CASCADE,
    CONSTRAINT job_errors_times_check CHECK (
        least(started_at, ended_at) >= '1970-01-01 00:00:00+00'
        AND greatest(started_at, ended_at) < '9999-12-31 00:00:00+00'
    )
);

-- The registry of live worker processes. A worker is hungry for a queue while it waits for jobs there;
-- enqueue notifies only then.
CREATE TABLE {schema}.workers (
    id            uuid        NOT NULL,
    host          text        NOT NULL,
    pid           integer     NOT NULL,
    version       text        NOT NULL,
    queues        text[]      NOT NULL,
    slots         integer     NOT NULL,
    lease         interval    NOT NULL,
    silence       interval    NOT NULL,
    running       integer     NOT NULL DEFAULT 0,
    hungry_queues text[]      NOT NULL DEFAULT '{}',
    started_at    timestamptz NOT NULL DEFAULT now(),
    heartbeat_at  timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT workers_pkey PRIMARY KEY (id),
    CONSTRAINT workers_times_check CHECK (
        least(started_at, heartbeat_at) >= '1970-01-01 00:00:00+00'
        AND greatest(started_at, heartbeat_at) < '9999-12-31 00:00:00+00'
    ),
    -- Everybody's sweeps count back from now by these; beyond the first year that a timestamp knows, they would fail.
    CONSTRAINT workers_spans_check CHECK (
        least(lease, silence) >= '0' AND greatest(lease, silence) <= interval '1000 years'
    )
) WITH (
    -- A handful of rows, updated all the time and read by every enqueue: keep it to one page.
    fillfactor = 50,
    autovacuum_vacuum_threshold = 20,
    autovacuum_vacuum_scale_factor = 0,
    autovacuum_vacuum_cost_delay = 0
);

-- What has been said about a queue; a queue without a row is simply open.
CREATE TABLE {schema}.queues (
    name      text        NOT NULL,
    paused_at timestamptz,
    CONSTRAINT queues_pkey PRIMARY KEY (name)
);

-- What the workers did, by the minute. Charts read this, never the jobs.
CREATE TABLE {schema}.job_stats (
    minute       timestamptz      NOT NULL,
    queue        text             NOT NULL,
    job_type     text             NOT NULL,
    completed    bigint           NOT NULL DEFAULT 0,
    failed       bigint           NOT NULL DEFAULT 0,
    dead         bigint           NOT NULL DEFAULT 0,
    run_seconds  double precision NOT NULL DEFAULT 0,
    wait_seconds double precision NOT NULL DEFAULT 0,
    CONSTRAINT job_stats_pkey PRIMARY KEY (minute, queue, job_type)
);
