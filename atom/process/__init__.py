"""Processes: children, liveness, messages on stderr, threads, garbage collection."""
