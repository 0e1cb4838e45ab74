"""The jobs of `atom-run`, one file each, with `run(config) -> exit code`.

A job with numbers for sweeps has their names in OBJECTIVES, and `run(config, tell)` passes them to `tell`.
"""
