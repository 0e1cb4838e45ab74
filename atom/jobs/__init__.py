"""What `atom-run` does, one file a job; each has `run(config) -> exit code`.

One that tells numbers has their names in OBJECTIVES, and `run(config, tell)` hands them to `tell`.
"""
