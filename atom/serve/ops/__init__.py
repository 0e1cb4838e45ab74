"""For operators: routes, metrics, traces, logs, systemd."""
