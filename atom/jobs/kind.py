"""Find the job that overrides name, or that their fields imply.

named_job(["job=chat"])                        # "chat"
implied_job(["job.stage=fuse_qkv"])            # "explain"
implied_job(["prompts=@batch.jsonl"])          # "batch" if that file's lines are OpenAI's, else "generate"
find_job(["recipe=demo"])                      # "generate", as its prompts imply

The schema says which jobs a field is for. Nothing here imports Hydra or torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from atom.config.schema import Jobs
from atom.config.schema_keys import jobs_of
from atom.config.spelling import ALIASES
from atom.errors import ConfigError
from atom.jobs.prompt_file import is_batch

DEFAULT = "serve"  # of conf/config.yaml


def find_job(overrides: Sequence[str]) -> str | None:
    """The job of these overrides; None if that is a mistake, or is said elsewhere than in files of this machine."""
    try:
        for texts in (overrides, open_recipes(overrides)):
            if (job := named_job(texts) or implied_job(texts)) is not None:
                return job
    except (ConfigError, FileNotFoundError):
        return None
    return DEFAULT


def open_recipes(overrides: Sequence[str]) -> list[str]:
    """The overrides of the recipes that these name. FileNotFoundError if one is not on this machine."""
    names = [text.partition("=")[2] for text in overrides if text.lstrip("+").startswith("recipe=")]
    if not names:
        return []
    from atom.config.recipes import find_recipe, read_recipe

    if not all(map(find_recipe, names)):
        raise FileNotFoundError
    return [text for name in names for text in read_recipe(name).overrides]


def named_job(overrides: Iterable[str]) -> str | None:
    """The last job that is named."""
    named = [text.partition("=")[2] for text in overrides if text.lstrip("+").startswith("job=")]
    return named[-1] if named else None


def implied_job(overrides: Iterable[str]) -> str | None:
    """The job that the fields of overrides imply; ConfigError if they imply two."""
    texts = list(overrides)
    own = [(key, jobs) for key, jobs in own_fields(keys_of(texts)) if jobs.implied is not None]
    only = {jobs.implied: key for key, jobs in own if len(jobs.names) == 1}
    if len(only) > 1:
        (one, key), (other, further) = list(only.items())[:2]
        raise ConfigError(f"{key} is a field of job={one}, {further} of job={other}: a run does one job, leave one out")
    implied = next(iter(only), own[0][1].implied if own else None)
    return "batch" if implied == "generate" and any(map(names_batch, texts)) else implied


def names_batch(override: str) -> bool:
    """Whether an override has a file of OpenAI's batch lines for its prompts."""
    match = re.fullmatch(r"prompts=(['\"]?)@(.+)\1", override)
    return match is not None and is_batch(Path(match[2]))


def own_fields(keys: Iterable[str]) -> list[tuple[str, Jobs]]:
    """The keys that are for some jobs only, with these jobs."""
    return [(key, jobs) for key in keys if (jobs := jobs_of(ALIASES.get(key, key)))]


def keys_of(overrides: Iterable[str]) -> list[str]:
    """The keys of overrides."""
    return [match[1] for text in overrides if (match := re.match(r"\+*([^~+=@][^=@]*)=", text))]
