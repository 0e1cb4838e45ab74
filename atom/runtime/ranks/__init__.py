"""Ranks: the processes of an engine that is divided among devices or hosts."""
