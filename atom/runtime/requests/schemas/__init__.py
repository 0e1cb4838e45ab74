"""JSON schemas: rewritten to what llguidance keeps, with the same meaning."""
