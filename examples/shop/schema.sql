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
