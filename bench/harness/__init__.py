"""recado's side of a public long-run comparison of job queues, and a driver of the same faults; see README.md."""
