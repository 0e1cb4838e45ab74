"""The jobs of `atom-run`, one file each, with `run(config) -> exit code`.

One that tells numbers has their names in OBJECTIVES, and `run(config, tell)` hands them to `tell`.
"""
