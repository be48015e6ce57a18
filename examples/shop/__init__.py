"""A small shop: orders, receipts by e-mail, payments that arrive as webhooks, a ledger, and a planner of machine rooms.

Read :mod:`~examples.shop.jobs` first, which declares what is done in the background and how, then
:mod:`~examples.shop.web`, which enqueues it. Long operations that a user watches are in
:mod:`~examples.shop.blueprints`, :mod:`~examples.shop.analysis` and :mod:`~examples.shop.backups`;
:mod:`~examples.shop.planner` starts them and shows how they go. ``make run`` is :mod:`~examples.shop.__main__`: it puts
all of it on an embedded PostgreSQL and lets :mod:`~examples.shop.customers` loose on it.
"""
