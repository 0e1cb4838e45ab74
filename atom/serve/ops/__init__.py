"""Operations: admin routes, metrics, traces, logs, systemd."""
