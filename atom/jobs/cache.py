"""`job=cache`: list, explain, prune, verify, export and import cache entries.

atom-run job=cache                                         # a line for each entry
atom-run job=cache job.entry=3f2a                          # what one was made of, by whom and when
atom-run job=cache job.prune=30d                           # removes what was unused for longer; 2GiB: what is beyond
atom-run job=cache job.verify=true                         # all checksums and owners
atom-run job=cache job.entry=3f2a job.export=qwen3.tar     # an artifact and its pieces as one file
atom-run job=cache job.import=qwen3.tar job.trust=true     # takes them in: code that will run as you
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from rich.console import Console

from atom.cache import Cache, Entry, digest, export, is_for_gpu, key_of, open_bundle
from atom.cache.files import Unfit, reason_of
from atom.config import Config, JobConfig
from atom.errors import ArtifactError, ConfigError
from atom.jobs.tables import make_table
from atom.process.messages import say

SECONDS = {"m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
RECIPE = "recipe.yaml"  # of an artifact: the overrides that start its launch
BYTES = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


def run(config: Config) -> int:
    """List the entries, or do what the job's fields ask for."""
    assert config.cache is not None, "config.load resolves it"
    cache, job = Cache(Path(config.cache)), config.job
    work = {
        "job.prune": (job.prune, _prune),
        "job.verify": (job.verify, _verify),
        "job.export": (job.export, _export),
        "job.import": (job.import_from, _import),
    }
    requested = {name: do for name, (value, do) in work.items() if value not in (None, False)}
    if len(requested) > 1:
        raise ConfigError(f"{' and '.join(requested)} are two jobs: do one after the other")
    if job.entry is not None and requested.keys() - {"job.export"}:
        raise ConfigError(f"{next(iter(requested))} takes no job.entry")
    if job.trust and job.import_from is None:
        raise ConfigError("job.trust is for job.import")
    do = next(iter(requested.values()), _list if job.entry is None else _explain)
    try:
        do(cache, job)
    finally:
        for line in cache.warnings:
            say(line)
    return 0


def _list(cache: Cache, job: JobConfig) -> None:
    _show(cache.entries(), job, cache)


def _explain(cache: Cache, job: JobConfig) -> None:
    entry = _chosen(cache.entries(), job.entry or "", cache)
    _show_whole(entry, job)


def _prune(cache: Cache, job: JobConfig) -> None:
    """Remove entries by age or size; those that cannot be removed are named at the end."""
    find_old = _limit(job.prune or "")
    removed: list[Entry] = []
    faults: list[str] = []
    for entry in find_old(cache.entries()):
        try:
            cache.remove(entry)
        except ArtifactError as error:
            faults.append(str(error))
        else:
            removed.append(entry)
    _show(removed, job, cache, "removed")
    if faults:
        raise ArtifactError("; ".join(faults))


def _limit(text: str) -> Callable[[Sequence[Entry]], list[Entry]]:
    """Parse a limit of age or size, `30d` or `2GiB`, to a function that selects the entries to remove."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]+)", text)
    number, unit = (float(match[1]), match[2]) if match else (0.0, "")
    if unit in SECONDS:
        try:
            oldest = datetime.now(UTC) - timedelta(seconds=number * SECONDS[unit])
        except OverflowError:
            raise ConfigError(f"job.prune={text}: nothing is as old as that") from None
        return lambda entries: [entry for entry in entries if _last_use(entry, entries) < oldest]
    if unit in BYTES:
        return lambda entries: _beyond(entries, number * BYTES[unit])
    units = f"{', '.join(SECONDS)} for how long unused, {', '.join(BYTES)} for how much to keep"
    raise ConfigError(f"job.prune={text} is neither an age, as 30d, nor a size, as 2GiB; units: {units}")


def _beyond(entries: Sequence[Entry], size: float) -> list[Entry]:
    """Select the least recently used entries, as few as it takes for the others to fit.

    An artifact goes with the last of its pieces, without which it is of no use.
    """
    held, gone = sum(entry.size for entry in entries), list[Entry]()
    for entry in sorted(entries, key=lambda entry: _last_use(entry, entries)):  # pieces come first in the list
        pieces = _pieces_of(entry, entries)
        if held > size or (pieces and all(piece in gone for piece in pieces)):
            gone.append(entry)
            held -= entry.size
    return gone


def _last_use(entry: Entry, entries: Sequence[Entry]) -> datetime:
    """The last use of an entry; of an artifact or one of its pieces, since a launch reads the artifact first."""
    return max((piece.used for piece in _pieces_of(entry, entries)), default=entry.used)


def _pieces_of(entry: Entry, entries: Sequence[Entry]) -> list[Entry]:
    """The entries of the pieces that an artifact names."""
    keys = entry.about.get("pieces") if entry.kind == "artifacts" else None
    return [each for each in entries if each.kind == "pieces" and each.key in keys] if isinstance(keys, list) else []


def _verify(cache: Cache, job: JobConfig) -> None:
    """Check every checksum and owner. Nothing is removed: a damaged entry is rebuilt when it is needed."""
    checked = [(entry, cache.verify(entry.kind, entry.key)) for entry in cache.entries()]
    num_faults = sum(fault is not None for _, fault in checked)
    for entry, fault in checked:
        if job.output == "json":
            print(json.dumps({"kind": entry.kind, "key": entry.key, "fault": fault}))
        elif fault:
            print(f"{entry.kind}/{entry.key[:12]}: {_printable(fault)}")
    if num_faults:
        raise ArtifactError(
            f"{num_faults} of {len(checked)} entries in {cache.folder} are damaged or not to be trusted"
        )
    if job.output != "json":
        print(f"all {len(checked)} entries in {cache.folder} are whole, and nobody else's")


def _export(cache: Cache, job: JobConfig) -> None:
    """Export one artifact with its pieces, chosen by job.entry among several."""
    if not job.export:
        raise ConfigError("job.export= names no file; write job.export=FILE")
    artifacts = cache.entries("artifacts")
    if job.entry is None and len(artifacts) != 1:
        raise ConfigError(f"job.export: {cache.folder} holds {len(artifacts)} artifacts; choose one with job.entry=KEY")
    artifact = artifacts[0] if job.entry is None else _chosen(artifacts, job.entry, cache)
    measured = {}
    if is_for_gpu(artifact):
        from atom.kernels import tuned  # imports torch, which a listing does not need

        measured = tuned.read_all(cache.folder, say)
    _show(export(cache, artifact, Path(job.export).expanduser(), measured), job, cache, "exported")
    _show_measured({gpu: sum(map(len, tables.values())) for gpu, tables in measured.items()}, job)


def _import(cache: Cache, job: JobConfig) -> None:
    """Show the content of a bundle and, if it is trusted, import its entries, pieces before their artifact."""
    path = Path(job.import_from or "").expanduser()
    if not path.is_file():
        raise ConfigError(f"job.import={job.import_from}: there is no such file")
    with open_bundle(path) as (bundle, entries, measured):
        artifact = entries[-1]
        if job.output == "json":
            _show(entries, job, cache)
        else:
            _show_whole(artifact, job)
            for entry in entries[:-1]:
                print(f"{entry.kind}/{entry.key[:12]} {_built_by(entry)}: {_printable(str(entry.about.get('name')))}")
        _check_bundle(job, entries)
        if not job.trust:
            raise ConfigError(
                f"job.import={job.import_from}: it is code that will run as you, and what is above is only "
                "what its maker says; job.trust=true imports it"
            )
        folders = [cache.copy(entry, bundle) for entry in entries]
        taken = _take_in(cache, measured)
        if job.output != "json":
            print()
            _show(entries, job, cache, "imported")
            _show_measured(taken, job)
            if RECIPE in artifact.files:
                print(f"recipe={folders[-1] / RECIPE} starts it")


def _take_in(cache: Cache, measured: Mapping[str, Any]) -> Mapping[str, int]:
    """Merge tuned parameters measured elsewhere; the number of new ones by GPU."""
    from atom.kernels import tuned

    try:
        return tuned.merge(cache.folder, measured)
    except (Unfit, OSError) as error:
        raise ArtifactError(f"{cache.folder} takes in no measured parameters: {reason_of(error)}") from None


def _show_measured(counts: Mapping[str, int], job: JobConfig) -> None:
    """Print a line for each GPU with tuned parameters."""
    for gpu, count in counts.items() if job.output != "json" else ():
        print(f"with what tune=true found on {gpu}: {count} {'entry' if count == 1 else 'entries'}")


def _check_bundle(job: JobConfig, entries: Sequence[Entry]) -> None:
    """Raise ArtifactError if entries do not match their keys, ConfigError if no launch here would use them."""
    from atom.compiler.artifact import differences_here, ingredients_of

    for entry in entries:
        ingredients, text = ingredients_of(entry), str(entry.about.get("text"))
        is_of_text = entry.kind != "pieces" or ingredients.get("text") == digest(text)
        if key_of(ingredients) != entry.key or not is_of_text:
            what = f"{entry.kind}/{entry.key[:12]} is not the key of what it says that it is made of"
            raise ArtifactError(f"{job.import_from} is not a bundle that job.export wrote: {what}")
    if differences := differences_here(entries):
        raise ConfigError(
            f"job.import={job.import_from}: it is of another machine or version, and would never be used here: other "
            f"{_printable(', '.join(differences))}"
        )


def _chosen(entries: Sequence[Entry], prefix: str, cache: Cache) -> Entry:
    """The one entry whose key, or kind/key, begins with this prefix."""
    matching = [each for each in entries if each.key.startswith(prefix) or f"{each.kind}/{each.key}".startswith(prefix)]
    if len(matching) == 1:
        return matching[0]
    if not matching:
        raise ConfigError(f"job.entry={prefix}: {cache.folder} holds no such entry; job=cache lists all entries")
    names = ", ".join(f"{entry.kind}/{entry.key[:12]}" for entry in matching[:4]) + (", …" if len(matching) > 4 else "")
    raise ConfigError(f"job.entry={prefix} may be {len(matching)} entries ({names}): write more of the key")


def _show(entries: Sequence[Entry], job: JobConfig, cache: Cache, verb: str = "") -> None:
    """Print a table with its total, or a JSON object for each entry."""
    if job.output == "json":
        for entry in entries:
            print(json.dumps(_plain(entry)))
        return
    now = datetime.now(UTC)
    table = make_table("kind", "key", "what", "size", "age", "unused", left=("kind", "key", "what"))
    for entry in entries:
        what = f"not used: {entry.fault}" if entry.fault else str(entry.about.get("name", ""))
        ages = (_age(now - entry.created), _age(now - entry.used))
        table.add_row(entry.kind, entry.key[:12], _printable(what), _size(entry.size), *ages)
    if entries:
        width = None if sys.stdout.isatty() else 1000  # lines are not cut in a pipe
        Console(width=width, markup=False, emoji=False, highlight=False).print(table)
    where = f"to {job.export}" if verb == "exported" else f"in {cache.folder}"
    total = f"{len(entries)} {'entry' if len(entries) == 1 else 'entries'}, {_size(sum(each.size for each in entries))}"
    print(" ".join(filter(None, (verb, total, where))))


def _show_whole(entry: Entry, job: JobConfig) -> None:
    if job.output == "json":
        print(json.dumps(_plain(entry)))
        return
    print(f"{entry.kind}/{entry.key}")
    if entry.fault:
        print(f"not used: {_printable(entry.fault)}")
    if entry.built_by:
        print(_built_by(entry))
    print("made of")
    for line in _words(entry.about):
        print(f"  {_printable(line)}")
    print(f"{len(entry.files)} file{'' if len(entry.files) == 1 else 's'}, {_size(entry.size)}")
    for name, size in entry.files.items():
        print(f"  {_printable(name)}  {_size(size)}")


def _built_by(entry: Entry) -> str:
    return f"built by {_printable(entry.built_by)} at {entry.created.isoformat(' ', 'seconds')}"


def _words(about: Any) -> Iterator[str]:
    """Format nested values as indented lines."""
    items = about.items() if isinstance(about, dict) else [("-", item) for item in about]
    for name, value in items:
        label = name if name == "-" else f"{name}:"
        if isinstance(value, dict | list) and value:
            yield label
            yield from (f"  {line}" for line in _words(value))
        else:
            lines = (value if isinstance(value, str) else json.dumps(value)).splitlines() or [""]
            yield f"{label} {lines[0]}".rstrip()
            yield from (f"  {line}" for line in lines[1:])


def _printable(text: str) -> str:
    """Escape what a terminal would interpret."""
    return "".join(each if each.isprintable() else "\N{REPLACEMENT CHARACTER}" for each in text)


def _plain(entry: Entry) -> dict[str, Any]:
    times = {"created": entry.created.isoformat(), "used": entry.used.isoformat()}
    return {name: times.get(name, value) for name, value in vars(entry).items()}


def _size(size: int) -> str:
    unit = next((name for name in reversed(BYTES) if size >= BYTES[name]), None)
    return f"{size} B" if unit is None else f"{size / BYTES[unit]:.1f} {unit}"


def _age(age: timedelta) -> str:
    seconds = max(age.total_seconds(), 0)
    for name, unit in (("d", "d"), ("h", "h"), ("m", "min")):
        if seconds >= SECONDS[name]:
            return f"{seconds / SECONDS[name]:.0f} {unit}"
    return f"{seconds:.0f} s"
