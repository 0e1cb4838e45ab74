"""Sweeps (`-m`): jobs of several overrides, and their report."""
