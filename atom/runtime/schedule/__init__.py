"""Decide what each step runs: queues, priorities, plans, data-parallel groups."""
