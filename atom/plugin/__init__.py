"""Run atom's models inside other engines."""
