-- The shop's own tables, next to recado's in the same database; run at each start.

CREATE SCHEMA IF NOT EXISTS shop;

CREATE TABLE IF NOT EXISTS shop.orders (
    id          uuid        PRIMARY KEY,
    customer    text        NOT NULL,
    email       text        NOT NULL,
    total_cents integer     NOT NULL CHECK (total_cents > 0),
    created_at  timestamptz NOT NULL DEFAULT now()
);

-- What the payment provider told us, as it told us: whether there is such an order is for the job to find out.
CREATE TABLE IF NOT EXISTS shop.payment_events (
    id           text        PRIMARY KEY,
    order_id     uuid        NOT NULL,
    amount_cents integer     NOT NULL CHECK (amount_cents > 0),
    received_at  timestamptz NOT NULL DEFAULT now()
);

-- Double entry: each event has a line for the bank and one for sales, and together they are 0.
CREATE TABLE IF NOT EXISTS shop.ledger (
    event_id     text        NOT NULL REFERENCES shop.payment_events (id),
    account      text        NOT NULL CHECK (account IN ('bank', 'sales')),
    order_id     uuid        NOT NULL REFERENCES shop.orders (id),
    amount_cents integer     NOT NULL,
    booked_at    timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (event_id, account)
);

-- What users plan. It belongs to their organizations, and the database sees to that as it does for recado's operations:
-- a transaction sees the rows of the organization that it names with tenant(), and with none named it sees nothing.

-- A file that was sent in; deleted once its blueprint is there.
CREATE TABLE IF NOT EXISTS shop.uploads (
    id              uuid        PRIMARY KEY,
    organization_id text        NOT NULL,
    name            text        NOT NULL,
    content         bytea       NOT NULL,
    created_at      timestamptz NOT NULL DEFAULT now()
);

-- A draft while its racks are being imported.
CREATE TABLE IF NOT EXISTS shop.blueprints (
    id              uuid        PRIMARY KEY,
    organization_id text        NOT NULL,
    name            text        NOT NULL,
    created_at      timestamptz NOT NULL DEFAULT now(),
    imported_at     timestamptz
);

CREATE UNIQUE INDEX IF NOT EXISTS blueprints_name_key ON shop.blueprints (organization_id, name)
WHERE imported_at IS NOT NULL;

CREATE TABLE IF NOT EXISTS shop.racks (
    blueprint_id    uuid        NOT NULL REFERENCES shop.blueprints (id) ON DELETE CASCADE,
    organization_id text        NOT NULL,
    position        text        NOT NULL,
    name            text        NOT NULL,
    height_units    integer     NOT NULL CHECK (height_units > 0),
    used_units      integer     NOT NULL CHECK (used_units BETWEEN 0 AND height_units),
    weight_kg       integer     NOT NULL CHECK (weight_kg >= 0),
    PRIMARY KEY (blueprint_id, position)
);

-- A file in the backups' folder; the id is that of the operation that wrote it.
CREATE TABLE IF NOT EXISTS shop.backups (
    id              uuid        PRIMARY KEY,
    organization_id text        NOT NULL,
    file            text        NOT NULL,
    sha256          text        NOT NULL,
    row_count       integer     NOT NULL,
    created_at      timestamptz NOT NULL DEFAULT now()
);

ALTER TABLE shop.uploads ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY;
ALTER TABLE shop.blueprints ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY;
ALTER TABLE shop.racks ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY;
ALTER TABLE shop.backups ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY;

-- There is no IF NOT EXISTS for these. (What is not set, and '', is nobody's: no organization has such an id.)
DROP POLICY IF EXISTS tenant_isolation ON shop.uploads;
DROP POLICY IF EXISTS tenant_isolation ON shop.blueprints;
DROP POLICY IF EXISTS tenant_isolation ON shop.racks;
DROP POLICY IF EXISTS tenant_isolation ON shop.backups;
CREATE POLICY tenant_isolation ON shop.uploads
    USING (organization_id = (SELECT current_setting('app.current_org_id', true)));
CREATE POLICY tenant_isolation ON shop.blueprints
    USING (organization_id = (SELECT current_setting('app.current_org_id', true)));
CREATE POLICY tenant_isolation ON shop.racks
    USING (organization_id = (SELECT current_setting('app.current_org_id', true)));
CREATE POLICY tenant_isolation ON shop.backups
    USING (organization_id = (SELECT current_setting('app.current_org_id', true)));
