"""The jobs of `atom-run`, one file each, with `run(config) -> exit code`.

A job with numbers for sweeps has their names in OBJECTIVES, and `run(config, report)` calls `report` with them.
"""
