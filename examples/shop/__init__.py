"""A small shop: orders, receipts by e-mail, payments that arrive as webhooks, and a ledger.

Read :mod:`~examples.shop.jobs` first, which declares what is done in the background and how, then
:mod:`~examples.shop.web`, which enqueues it. ``make run`` is :mod:`~examples.shop.__main__`: it puts both on an
embedded PostgreSQL and lets :mod:`~examples.shop.customers` loose on them.
"""
