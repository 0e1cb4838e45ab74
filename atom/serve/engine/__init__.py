"""The engine's process, and its client in the HTTP process.

A socket pair and msgpack are between them.
"""
