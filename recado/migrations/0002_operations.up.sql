-- Operations: the public face of a long job, a row that a client polls. Its job has the same id.

CREATE TABLE {schema}.operations (
    job_id          uuid        NOT NULL,
    organization_id text        NOT NULL,
    kind            text        NOT NULL,
    status          text        NOT NULL DEFAULT 'pending',
    progress        smallint    NOT NULL DEFAULT 0,
    result          jsonb,
    error           text,
    created_by      text,
    -- The attempt that may write: the fence of its claim.
    fence           integer     NOT NULL DEFAULT 0,
    -- Moves with each change; what a stream of events goes on from.
    version         integer     NOT NULL DEFAULT 1,
    created_at      timestamptz NOT NULL DEFAULT now(),
    updated_at      timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT operations_pkey PRIMARY KEY (job_id),
    -- '' is what a setting is after SET LOCAL ends, '0' is the system: neither may be somebody's organization.
    CONSTRAINT operations_organization_id_check CHECK (organization_id NOT IN ('', '0')),
    CONSTRAINT operations_status_check CHECK (status IN ('pending', 'processing', 'done', 'error')),
    CONSTRAINT operations_progress_check CHECK (progress BETWEEN 0 AND 100),
    CONSTRAINT operations_error_check CHECK (length(error) <= 2000),
    -- As for jobs. Not clamped where it is read: the page after it would begin somewhere else.
    CONSTRAINT operations_times_check CHECK (
        least(created_at, updated_at) >= '1970-01-01 00:00:00+00'
        AND greatest(created_at, updated_at) < '9999-12-31 00:00:00+00'
    )
);

-- An organization's own, newest first, page by page.
CREATE INDEX operations_organization_idx ON {schema}.operations (organization_id, created_at DESC, job_id DESC);
-- The expiry of what nobody works on any more.
CREATE INDEX operations_status_idx ON {schema}.operations (status, created_at DESC);

-- Whoever has not said for whom it asks sees nothing; neither does '', which a pooled connection's setting is after
-- SET LOCAL ends. Forced: the owner of the table is no exception. (Superusers are, and roles with BYPASSRLS.)
ALTER TABLE {schema}.operations ENABLE ROW LEVEL SECURITY;
ALTER TABLE {schema}.operations FORCE ROW LEVEL SECURITY;
CREATE POLICY tenant_isolation ON {schema}.operations
    USING (
        organization_id = (SELECT current_setting('app.current_org_id', true))
        OR (SELECT current_setting('app.current_org_id', true)) = '0'
    )
    WITH CHECK (
        organization_id = (SELECT current_setting('app.current_org_id', true))
        OR (SELECT current_setting('app.current_org_id', true)) = '0'
    );
