"""Measure servers and engines alike: latencies, conversations, hardware. No torch."""
