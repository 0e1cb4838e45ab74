"""What `atom-run` does, one file a job; each has `run(config) -> exit code`."""
