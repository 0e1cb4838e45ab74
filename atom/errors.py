"""Every error a user can meet. The message says what happened, where, and what to do, in one line.

    AtomError
    ├── ConfigError        an override, a key, a value
    ├── CheckpointError    a file of the checkpoint, a tensor in it
    ├── UnsupportedError   a thing that atom does not do (yet), here
    ├── RequestError       one request's prompt or sampling values
    ├── PassError          a pass produced a graph that its level does not allow
    ├── ArtifactError      a compiled artifact
    ├── CapacityError      memory
    └── EngineDeadError    the engine has stopped

The first four are the user's to mend and end a command with 2, the others with 1. A server that cannot load its model
ends with 2 for all but the last: the next start would meet the same.
"""

from __future__ import annotations


class AtomError(Exception):
    exit_code = 1


class ConfigError(AtomError):
    exit_code = 2


class CheckpointError(AtomError):
    exit_code = 2


class UnsupportedError(AtomError):
    exit_code = 2


class RequestError(AtomError, ValueError):
    exit_code = 2


class PassError(AtomError):
    pass


class ArtifactError(AtomError):
    pass


class CapacityError(AtomError):
    pass


class EngineDeadError(AtomError):
    pass
