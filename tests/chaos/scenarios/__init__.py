"""The chaos programs: each takes a database and a size, breaks something, and returns what it counted."""
