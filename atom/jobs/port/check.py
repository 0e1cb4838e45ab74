"""Compare a draft with transformers on a tiny random model of the checkpoint's family."""

from __future__ import annotations

import tempfile
from pathlib import Path

from atom.checkpoint import fetch_file
from atom.config import Config
from atom.config.load import load
from atom.config.spelling import override
from atom.errors import ConfigError
from atom.jobs import module_of
from atom.jobs.port.fit import Draft, write
from atom.jobs.port.tiny import save_tiny


def check_tiny(config: Config, draft: Draft, named: str | None) -> int:
    """Compare a draft, or the model file of this name; the exit code of `job=compare`."""
    with tempfile.TemporaryDirectory() as folder:
        save_tiny(config_file(config), Path(folder, "tiny"))
        if named is None:
            write(draft.text(), Path(folder, "conf", "model", f"{draft.name}.yaml"))
        values = {
            "checkpoint": f"{folder}/tiny",
            "model": named or draft.name,
            "dtype": "fp32",
            "device": "cpu",
            "level": 0,
        }
        overrides = [*(override(key, value) for key, value in values.items()), "job=compare", "job.b=transformers"]
        if config.job.output != "text":
            overrides.append(override("job.output", config.job.output))
        dirs = [*([f"{folder}/conf"] if named is None else []), *config.config_dirs]
        code: int = module_of("compare").run(load(overrides, config_dirs=dirs))
        return code


def config_file(config: Config) -> Path:
    """The checkpoint's config.json. ConfigError for a GGUF file, which has none."""
    assert config.checkpoint is not None, "the job checks it"
    path = Path(config.checkpoint).expanduser()
    if path.suffix == ".gguf" or path.is_file():
        raise ConfigError("job.check=true makes a model from config.json, which a GGUF file does not have")
    return (
        path / "config.json"
        if path.is_dir()
        else fetch_file(config.checkpoint, "config.json", revision=config.revision)
    )
