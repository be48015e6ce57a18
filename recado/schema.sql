-- The whole current schema, to be read. Generated from the migrations, and held to them by a test:
--     python -m tests.catalog > recado/schema.sql
-- To bring a database to it, use `recado migrate up`, or give psql what `recado migrate sql` prints.

CREATE SCHEMA recado;

CREATE TABLE recado.job_errors (
    job_id      uuid                     NOT NULL,
    fence       integer                  NOT NULL,
    attempt     smallint                 NOT NULL,
    worker_id   uuid,
    started_at  timestamp with time zone,
    ended_at    timestamp with time zone NOT NULL DEFAULT now(),
    error_class text                     NOT NULL,
    message     text                     NOT NULL,
    traceback   text,
    CONSTRAINT job_errors_pkey PRIMARY KEY (job_id, fence),
    CONSTRAINT job_errors_times_check CHECK (LEAST(started_at, ended_at) >= '1970-01-01 00:00:00+00'::timestamp with time zone AND GREATEST(started_at, ended_at) < '9999-12-31 00:00:00+00'::timestamp with time zone)
);

CREATE TABLE recado.job_stats (
    minute       timestamp with time zone NOT NULL,
    queue        text                     NOT NULL,
    job_type     text                     NOT NULL,
    completed    bigint                   NOT NULL DEFAULT 0,
    failed       bigint                   NOT NULL DEFAULT 0,
    dead         bigint                   NOT NULL DEFAULT 0,
    run_seconds  double precision         NOT NULL DEFAULT 0,
    wait_seconds double precision         NOT NULL DEFAULT 0,
    CONSTRAINT job_stats_pkey PRIMARY KEY (minute, queue, job_type)
);

CREATE TABLE recado.jobs (
    id              uuid                     NOT NULL,
    job_type        text                     NOT NULL,
    queue           text                     NOT NULL DEFAULT 'default'::text,
    priority        smallint                 NOT NULL DEFAULT 1,
    payload         jsonb                    NOT NULL,
    status          text                     NOT NULL DEFAULT 'pending'::text,
    attempts        smallint                 NOT NULL DEFAULT 0,
    max_attempts    smallint                 NOT NULL DEFAULT 5,
    reclaims        smallint                 NOT NULL DEFAULT 0,
    critical        boolean                  NOT NULL DEFAULT false,
    fence           integer                  NOT NULL DEFAULT 0,
    run_at          timestamp with time zone NOT NULL DEFAULT now(),
    locked_at       timestamp with time zone,
    locked_by       uuid,
    last_error      text,
    idempotency_key text,
    result          jsonb,
    metadata        jsonb                    NOT NULL DEFAULT '{}'::jsonb,
    created_at      timestamp with time zone NOT NULL DEFAULT now(),
    updated_at      timestamp with time zone NOT NULL DEFAULT now(),
    finished_at     timestamp with time zone,
    CONSTRAINT jobs_pkey PRIMARY KEY (id),
    CONSTRAINT jobs_attempts_check CHECK (attempts >= 0 AND attempts <= max_attempts AND max_attempts > 0),
    CONSTRAINT jobs_priority_check CHECK (priority >= 0 AND priority <= 3),
    CONSTRAINT jobs_run_at_check CHECK (run_at >= '1970-01-01 00:00:00+00'::timestamp with time zone AND run_at < '9999-12-31 00:00:00+00'::timestamp with time zone),
    CONSTRAINT jobs_status_check CHECK (status = ANY (ARRAY['pending'::text, 'running'::text, 'completed'::text, 'dead'::text, 'cancelled'::text])),
    CONSTRAINT jobs_times_check CHECK (LEAST(created_at, updated_at, locked_at, finished_at) >= '1970-01-01 00:00:00+00'::timestamp with time zone AND GREATEST(created_at, updated_at, locked_at, finished_at) < '9999-12-31 00:00:00+00'::timestamp with time zone)
) WITH (
    autovacuum_analyze_scale_factor = 0.01,
    autovacuum_vacuum_cost_delay = 0,
    autovacuum_vacuum_insert_scale_factor = 0.01,
    autovacuum_vacuum_scale_factor = 0.01
);
CREATE INDEX jobs_claim_idx ON recado.jobs USING btree (queue, priority, run_at, id) WHERE (status = 'pending'::text);
CREATE INDEX jobs_dead_idx ON recado.jobs USING btree (finished_at, id) WHERE (status = 'dead'::text);
CREATE UNIQUE INDEX jobs_idempotency_key_idx ON recado.jobs USING btree (job_type, idempotency_key) WHERE (idempotency_key IS NOT NULL);
CREATE INDEX jobs_running_idx ON recado.jobs USING btree (locked_at) WHERE (status = 'running'::text);

CREATE TABLE recado.operations (
    job_id          uuid                     NOT NULL,
    organization_id text                     NOT NULL,
    kind            text                     NOT NULL,
    status          text                     NOT NULL DEFAULT 'pending'::text,
    progress        smallint                 NOT NULL DEFAULT 0,
    result          jsonb,
    error           text,
    created_by      text,
    fence           integer                  NOT NULL DEFAULT 0,
    version         integer                  NOT NULL DEFAULT 1,
    created_at      timestamp with time zone NOT NULL DEFAULT now(),
    updated_at      timestamp with time zone NOT NULL DEFAULT now(),
    CONSTRAINT operations_pkey PRIMARY KEY (job_id),
    CONSTRAINT operations_error_check CHECK (length(error) <= 2000),
    CONSTRAINT operations_organization_id_check CHECK (organization_id <> ALL (ARRAY[''::text, '0'::text])),
    CONSTRAINT operations_progress_check CHECK (progress >= 0 AND progress <= 100),
    CONSTRAINT operations_status_check CHECK (status = ANY (ARRAY['pending'::text, 'processing'::text, 'done'::text, 'error'::text])),
    CONSTRAINT operations_times_check CHECK (LEAST(created_at, updated_at) >= '1970-01-01 00:00:00+00'::timestamp with time zone AND GREATEST(created_at, updated_at) < '9999-12-31 00:00:00+00'::timestamp with time zone)
);
CREATE INDEX operations_organization_idx ON recado.operations USING btree (organization_id, created_at DESC, job_id DESC);
CREATE INDEX operations_status_idx ON recado.operations USING btree (status, created_at DESC);
ALTER TABLE recado.operations ENABLE ROW LEVEL SECURITY;
ALTER TABLE recado.operations FORCE ROW LEVEL SECURITY;
CREATE POLICY tenant_isolation ON recado.operations AS PERMISSIVE FOR ALL TO public
    USING (((organization_id = ( SELECT current_setting('app.current_org_id'::text, true) AS current_setting)) OR (( SELECT current_setting('app.current_org_id'::text, true) AS current_setting) = '0'::text)))
    WITH CHECK (((organization_id = ( SELECT current_setting('app.current_org_id'::text, true) AS current_setting)) OR (( SELECT current_setting('app.current_org_id'::text, true) AS current_setting) = '0'::text)));

CREATE TABLE recado.queues (
    name      text                     NOT NULL,
    paused_at timestamp with time zone,
    CONSTRAINT queues_pkey PRIMARY KEY (name)
);

CREATE TABLE recado.schedule_holders (
    application text NOT NULL,
    name        text NOT NULL,
    worker_id   uuid NOT NULL,
    definition  text NOT NULL,
    CONSTRAINT schedule_holders_pkey PRIMARY KEY (application, name, worker_id)
);

CREATE TABLE recado.schedules (
    application text                     NOT NULL,
    name        text                     NOT NULL,
    job_type    text,
    expression  text                     NOT NULL,
    timezone    text                     NOT NULL,
    payload     jsonb                    NOT NULL,
    overlap     text                     NOT NULL,
    definition  text                     NOT NULL,
    last_tick   timestamp with time zone NOT NULL,
    last_job_id uuid,
    paused_at   timestamp with time zone,
    created_at  timestamp with time zone NOT NULL DEFAULT now(),
    updated_at  timestamp with time zone NOT NULL DEFAULT now(),
    CONSTRAINT schedules_pkey PRIMARY KEY (application, name),
    CONSTRAINT schedules_job_type_check CHECK ((application = ''::text) = (job_type IS NULL)),
    CONSTRAINT schedules_overlap_check CHECK (overlap = ANY (ARRAY['skip'::text, 'queue'::text])),
    CONSTRAINT schedules_times_check CHECK (LEAST(last_tick, paused_at, created_at, updated_at) >= '1970-01-01 00:00:00+00'::timestamp with time zone AND GREATEST(last_tick, paused_at, created_at, updated_at) < '9999-12-31 00:00:00+00'::timestamp with time zone)
);

CREATE TABLE recado.schema_migrations (
    number     integer                  NOT NULL,
    name       text                     NOT NULL,
    checksum   text                     NOT NULL,
    applied_at timestamp with time zone NOT NULL DEFAULT now(),
    CONSTRAINT schema_migrations_pkey PRIMARY KEY (number)
);

CREATE TABLE recado.workers (
    id            uuid                     NOT NULL,
    host          text                     NOT NULL,
    pid           integer                  NOT NULL,
    version       text                     NOT NULL,
    queues        text[]                   NOT NULL,
    slots         integer                  NOT NULL,
    lease         interval                 NOT NULL,
    silence       interval                 NOT NULL,
    running       integer                  NOT NULL DEFAULT 0,
    hungry_queues text[]                   NOT NULL DEFAULT '{}'::text[],
    started_at    timestamp with time zone NOT NULL DEFAULT now(),
    heartbeat_at  timestamp with time zone NOT NULL DEFAULT now(),
    CONSTRAINT workers_pkey PRIMARY KEY (id),
    CONSTRAINT workers_spans_check CHECK (LEAST(lease, silence) >= '00:00:00'::interval AND GREATEST(lease, silence) <= '1000 years'::interval),
    CONSTRAINT workers_times_check CHECK (LEAST(started_at, heartbeat_at) >= '1970-01-01 00:00:00+00'::timestamp with time zone AND GREATEST(started_at, heartbeat_at) < '9999-12-31 00:00:00+00'::timestamp with time zone)
) WITH (
    autovacuum_vacuum_cost_delay = 0,
    autovacuum_vacuum_scale_factor = 0,
    autovacuum_vacuum_threshold = 20,
    fillfactor = 50
);

ALTER TABLE recado.job_errors
    ADD CONSTRAINT job_errors_job_id_fkey FOREIGN KEY (job_id) REFERENCES recado.jobs(id) ON DELETE CASCADE;
ALTER TABLE recado.schedule_holders
    ADD CONSTRAINT schedule_holders_worker_id_fkey FOREIGN KEY (worker_id) REFERENCES recado.workers(id) ON DELETE CASCADE;
