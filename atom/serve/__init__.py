"""Serve the OpenAI and Anthropic APIs over HTTP.

The app is one process, the engine another, with a socket pair between them.
"""
