"""Anthropic's routes: the Messages API."""
