"""Download checkpoints by hub id.

    download("org/name", revision="main")      # Path of the local snapshot

huggingface_hub does the work, with its cache and its settings: HF_TOKEN, HF_HOME, HF_ENDPOINT, HF_HUB_OFFLINE.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub import errors
from tqdm import tqdm  # type: ignore[import-untyped]

from atom.checkpoint.cross_encoder import logit_file
from atom.checkpoint.folder import pooling_file, read_modules
from atom.checkpoint.progress import SILENT, Progress, Task
from atom.errors import AtomError, CheckpointError, UnreachableError, first_line

DESCRIPTION = ["*.json", "*.jinja", "*.py", "*.txt", "*.model"]
SINGLE = "model.safetensors"
SKIP = ["*/*", "consolidated*"]  # other formats' copies of the same weights


def counting_bar(task: Task) -> type[tqdm]:
    """A class of bars for the hub's library: they show nothing, and report to the task how many bytes have come.

    Several of its bars may count the same bytes, as received and as written: the one that is furthest counts.
    """
    counting, furthest = threading.Lock(), 0

    class CountingBar(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **(options | {"disable": True}))
            self.in_bytes, self.done = options.get("unit") == "B", 0

        def update(self, n: float | None = 1) -> None:
            nonlocal furthest
            with counting:
                self.done += int(n or 0)
                gained = self.done - furthest if self.in_bytes else 0
                furthest += max(gained, 0)
            if gained > 0:
                task.advance(gained)

    return CountingBar


def download(name: str, *, revision: str | None = None, weights: bool = True, progress: Progress = SILENT) -> Path:
    """Download a checkpoint (without `weights`, only its description), or find it in the cache."""
    wanted = [*DESCRIPTION, "*.safetensors"] if weights else DESCRIPTION
    at = f"{name} (revision {revision})" if revision else name
    with one_line_errors(name, revision, at), progress.task(f"Fetching {at} from the hub") as task:
        folder = huggingface_hub.snapshot_download(
            name, revision=revision, allow_patterns=wanted, ignore_patterns=SKIP, tqdm_class=counting_bar(task)
        )
        modules = read_modules(Path(folder))
        for path in filter(None, (pooling_file(modules), logit_file(modules))):  # which stand in folders of their own
            fetch = huggingface_hub.hf_hub_download
            with suppress(errors.EntryNotFoundError):
                fetch(name, path, revision=Path(folder).name, tqdm_class=counting_bar(task))
        return Path(folder)


def download_file(name: str, path: str, *, revision: str | None = None, progress: Progress = SILENT) -> Path:
    """Download one file, or find it in the cache."""
    at = f"{path} of {name}"
    with one_line_errors(name, revision, at), progress.task(f"Fetching {at} from the hub") as task:
        bar = counting_bar(task)
        return Path(huggingface_hub.hf_hub_download(name, path, revision=revision, tqdm_class=bar))


def list_files(name: str, *, revision: str | None = None) -> list[str]:
    """The paths of a repository's files; offline, of those in the cache."""
    with one_line_errors(name, revision, name):
        try:  # model_info, since list_repo_files tries for half a minute if there is no network
            return [file.rfilename for file in huggingface_hub.model_info(name, revision=revision).siblings or ()]
        except (errors.HfHubHTTPError, errors.HFValidationError):
            raise
        except Exception:  # offline, or no way to the hub: the HTTP library beneath has errors of its own
            folder = Path(huggingface_hub.snapshot_download(name, revision=revision, local_files_only=True))
            return [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]


def tensor_names(name: str, revision: str) -> Collection[str]:
    """The names in the header of a single weight file, of which no more is fetched; empty offline or without it."""
    with one_line_errors(name, revision, f"the header of {name}/{SINGLE}"):
        try:
            return huggingface_hub.parse_safetensors_file_metadata(name, SINGLE, revision=revision).tensors.keys()
        except (errors.EntryNotFoundError, errors.OfflineModeIsEnabled):
            return ()


@contextmanager
def one_line_errors(name: str, revision: str | None, at: str) -> Iterator[None]:
    """Raise one of our errors, of one line, for one of the hub's.

    at: what is downloaded.
    """
    try:
        yield
    except errors.GatedRepoError:
        raise CheckpointError(f"{name} is gated: ask for access on its page and set HF_TOKEN") from None
    except errors.RevisionNotFoundError:
        raise CheckpointError(f"{name} has no revision {revision} on the hub") from None
    except (errors.RepositoryNotFoundError, errors.HFValidationError):
        raise CheckpointError(
            f"no checkpoint {name}: no folder or .gguf file here, no model on the hub (a private one needs HF_TOKEN)"
        ) from None
    except errors.LocalEntryNotFoundError:
        raise UnreachableError(
            f"{at} is not a folder or .gguf file here and not in the hub's cache, and the hub cannot be reached: "
            "check the network and HF_HUB_OFFLINE"
        ) from None
    except Exception as error:  # the HTTP library beneath has changed over versions, and its errors with it
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            raise AtomError(
                f"the disk is full: no room for {at} in the hub's cache; free some or set HF_HOME"
            ) from error
        raise UnreachableError(f"cannot download {at}: {first_line(error)}") from error
