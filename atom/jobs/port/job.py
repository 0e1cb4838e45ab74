"""`job=port`: draft a model file for a checkpoint whose architecture atom does not know.

atom-run job=port checkpoint=/models/new > my_conf/model/new.yaml
atom-run job=port checkpoint=/models/new job.save_draft=my_conf/model/new.yaml
atom-run --config-dir my_conf job=port checkpoint=/models/new model=new job.check=true   # against transformers
atom-run job=port checkpoint=/models/new job.output=json

It reads config.json and the headers of files, no weights. The draft begins with the nearest shipped file; comments list
what has no place in it, and which shipped file has a block for it. The exit code is 0 if every tensor has its place, 1
if not; with job.check=true it is that of `job=compare`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from atom.checkpoint import open_checkpoint
from atom.config import Config
from atom.config.model_files import choose_model, model_files, search_path_of, with_inherited
from atom.config.unsupported import missing_block
from atom.errors import AtomError, ConfigError, one_line
from atom.jobs.port.check import check_tiny
from atom.jobs.port.draft import write_draft
from atom.jobs.port.edit import is_read
from atom.jobs.port.fit import Draft, Fit, hold, write
from atom.jobs.port.hints import hint_of, unread_fields
from atom.jobs.port.known import NOT_READ, Described, Known, leaves_of, read_known, reads_of
from atom.jobs.port.nearest import Rank, rank
from atom.jobs.port.stored import Stored, module_of, read_stored
from atom.jobs.port.text import describe_fit, describe_stored, write_file
from atom.process.messages import say

NUM_TRIED = 8  # of the nearest files, of which the one that fits best is taken
ONLY_A_FILE = "a model file"  # how conf/unsupported.yaml begins where no block is missing
OWN = (*NOT_READ, "weights", "stacked", "ignore", "gguf", "assumes")  # of a file, which say nothing of its layers
NUM_SHOWN = 3  # files that a draft names besides the one that it begins with


def run(config: Config) -> int:
    """Print the draft, or write it to job.save_draft; the exit code."""
    check_fields(config)
    assert config.checkpoint is not None, "checked above"
    described = open_checkpoint(config.checkpoint, revision=config.revision, weights=False)
    try:
        hf, stored = described.config, read_stored(described)
    finally:
        described.close()
    known = read_known(model_files(search_path_of(config.overrides, config.config_dirs)))
    named = named_file(config, known)
    say_if_known(config, hf, known)

    def fits(draft: Draft) -> Fit:
        return hold(draft, str(config.checkpoint), stored, config.revision, config.config_dirs)

    ranked = rank(known, hf, stored)
    if named is None:
        plain = [each for each in ranked if each.name == "decoder"]
        files = [each.described for each in [*ranked[:NUM_TRIED], *plain]]
        tried = [(file, *write_draft(file, known, hf, stored, fits)) for file in files]
        _, draft, fit = min(tried, key=lambda each: (each[2].faults, num_unlike(each[0], each[1], known, hf)))
    else:
        draft = Draft(f"my_{named.name}", {"defaults": [named.name, "_self_"]})
        fit = fits(draft)
    result = describe(config, draft, fit, hf, stored, known, ranked)
    return finish(config, draft, result, fit, stored, None if named is None else named.name)


def say_if_known(config: Config, hf: Mapping[str, Any], known: Known) -> None:
    """Print a line if `model=auto` takes a file already."""
    with suppress(AtomError):
        name = choose_model(hf, [each.file for each in known.files], str(config.checkpoint))
        say(f"model=auto takes conf/model/{name}.yaml for this checkpoint already")


def num_unlike(file: Described, draft: Draft, known: Known, hf: Mapping[str, Any]) -> int:
    """How much a file that a draft begins with says that the checkpoint does not: its constants, and what it leaves."""
    chain = [each for each in with_inherited(file.name, [each.file for each in known.files]) if each.name != "decoder"]
    lines = [{key: value for key, value in each.spec.items() if key not in OWN} for each in chain]
    constants = [at for each in lines for at, value in leaves_of(each) if not is_read(value)]
    absent = [read.at for each in lines for read in reads_of(each) if read.key.partition(".")[0] not in hf]
    left = [hint for hint in unread_fields(hf, keys_read(file, draft), known).values() if hint]
    return len(constants) + len(set(absent)) + len(left)


def keys_read(file: Described, draft: Draft) -> set[str]:
    """The keys of config.json that a draft reads, those of the file that it begins with included."""
    reads = [
        *reads_of(draft.spec),
        *(each for each in file.reads() if "mlp" not in draft.spec or each.at[:4] != "mlp."),
    ]
    return {each.key.partition(".")[0] for each in reads}


def check_fields(config: Config) -> None:
    """ConfigError for what the job cannot do."""
    if config.checkpoint is None:
        raise ConfigError("job=port has no checkpoint; set checkpoint=FOLDER, a hub id or a .gguf file")
    for text in config.overrides:
        if text.lstrip("+~").startswith("model."):
            raise ConfigError(f"{text}: job=port writes these fields; set them in its file")
    if config.job.check and config.job.output == "json":
        raise ConfigError("job.check=true prints a comparison: leave out job.output=json")


def named_file(config: Config, known: Known) -> Described | None:
    """The model file of `model=NAME`; None for `auto`."""
    names = [text.partition("=")[2].strip("'\"") for text in config.overrides if text.startswith("model=")]
    if not names or names[-1] == "auto":
        return None
    found = next((each for each in known.files if each.name == names[-1]), None)
    if found is None:
        raise ConfigError(f"model={names[-1]}: there is no such model file to begin with")
    return found


def finish(
    config: Config, draft: Draft, result: Mapping[str, Any], fit: Fit, stored: Mapping[str, Stored], named: str | None
) -> int:
    """Write what was asked for; the exit code."""
    job = config.job
    if job.save_draft is not None:
        path = Path(job.save_draft)
        if path.exists():
            raise ConfigError(f"job.save_draft={path}: the file exists; name another")
        try:
            write(write_file(draft, result), path)
        except OSError as error:
            raise ConfigError(f"job.save_draft={path}: {error.strerror}") from None
        say(f"{path} has the draft, which was not compared with anything")
    if job.check:
        say(f"{result['base'] if named else 'the draft'}: {describe_fit(fit, stored)}")
        return check_tiny(config, draft, named)
    if job.output == "json":
        print(json.dumps(result))
    elif job.save_draft is None:
        sys.stdout.write(write_file(draft, result))
    say(f"{result['base'] if named else 'the draft'}: {describe_fit(fit, stored)}")
    return 1 if fit.faults or result["needs"] or not stored else 0


def describe(
    config: Config,
    draft: Draft,
    fit: Fit,
    hf: Mapping[str, Any],
    stored: Mapping[str, Stored],
    known: Known,
    ranked: Sequence[Rank],
) -> dict[str, Any]:
    """What `job.output=json` prints."""
    base = str(draft.spec["defaults"][0])
    missing = {name: missing_block(name) for name in hf.get("architectures") or []}
    needs = [f"{name} needs {what}" for name, what in missing.items() if what and not what.startswith(ONLY_A_FILE)]
    below = next(each for each in known.files if each.name == base)
    read = keys_read(below, draft)
    read |= set(fit.model.assumes if fit.model is not None else {})
    return {
        "checkpoint": config.checkpoint,
        "name": draft.name,
        "base": f"conf/model/{base}.yaml",
        "also_near": [each.name for each in ranked if each.name != base and each.num_tensors][:NUM_SHOWN],
        "needs": "; ".join(needs),
        "error": one_line(fit.error) if fit.error is not None else None,
        "draft": draft.spec,
        "guesses": draft.guesses,
        "stored": len(stored),
        "placed": len(stored) - len(fit.unread),
        "unread_tensors": {
            name: {"stored": describe_stored(stored[name]), "hint": hint_of(name, known)}
            for name in fit.unread
            if fit.error is None or module_of(name) not in below.weights.values()
        },
        "missing_tensors": {name: list(fit.needed[name]) for name in fit.missing},
        "misshapen_tensors": {name: [list(each) for each in shapes] for name, shapes in fit.misshapen.items()},
        "unread_fields": {
            key: {"value": hf[key], "hint": hint} for key, hint in unread_fields(hf, read, known).items()
        },
    }
