"""What is measured of a server and of an engine alike: latencies, conversations, the machine. No torch."""
