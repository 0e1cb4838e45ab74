"""Speculative decoding: draft tokens, and how many."""
