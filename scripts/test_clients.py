"""Try clients that others write, and print a table of verdicts.

The exit status is how many failed. Requests and answers are kept in .venv-clients/records, a file a client.

scripts/test-clients [--newest] [NAME …]
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import serving  # noqa: E402
import transformers  # noqa: E402

from scripts.clients.agents import AGENTS, try_agent  # noqa: E402
from scripts.clients.install import MissingError, install_npm, install_python  # noqa: E402
from scripts.clients.sdks import AI_SDK, SEEING, try_ai_sdk, try_python  # noqa: E402
from scripts.clients.servers import save_seer  # noqa: E402
from scripts.clients.verdict import Verdict, make_table  # noqa: E402
from scripts.clients.versions import NPM, PYTHON  # noqa: E402

FOLDER = ROOT / ".venv-clients"
RECORDS, PACKAGES = FOLDER / "records", FOLDER / "npm"


class Trial:
    """Tries clients. is_newest: the newest versions rather than those of versions.py"""

    def __init__(self, is_newest: bool, opened: contextlib.ExitStack) -> None:
        self._is_newest, self._opened = is_newest, opened
        self._talker: tuple[str, Path] | None = None
        self._seer = ""

    def run(self, name: str) -> list[Verdict]:
        """What came of a client; a fault of the installation is one of it."""
        try:
            if name in AGENTS:
                return [self._try_agent(name)]
            return [self._try_ai_sdk(name)] if name in AI_SDK else self._try_python(name)
        except MissingError as error:
            return [Verdict(name, "none", "nothing", str(error))]
        except (OSError, subprocess.SubprocessError, AssertionError) as error:
            traceback.print_exc()
            return [Verdict(name, "unknown", "nothing", type(error).__name__)]

    def _try_agent(self, name: str) -> Verdict:
        package = AGENTS[name].package
        versions = install_npm(self._pins(package), PACKAGES)
        return try_agent(name, versions[package], PACKAGES / "node_modules" / ".bin", RECORDS)

    def _try_ai_sdk(self, name: str) -> Verdict:
        versions = install_npm(self._pins("ai", "zod", name), PACKAGES)
        url, _ = self._serve_talker()
        return try_ai_sdk(name, f"{versions[name]}, ai {versions['ai']}", PACKAGES, url, RECORDS)

    def _try_python(self, name: str) -> list[Verdict]:
        python = install_python(name, None if self._is_newest else PYTHON[name], FOLDER)
        seer = self._serve_seer() if name in SEEING else ""
        verdict = try_python(name, python, *self._serve_talker(), RECORDS, seer)
        return [verdict, check_contracts(python, verdict.version)] if name == "vllm" else [verdict]

    def _pins(self, *packages: str) -> dict[str, str | None]:
        return {package: None if self._is_newest else NPM[package] for package in packages}

    def _serve_seer(self) -> str:
        """The URL of a server of a tiny model that reads images; started for the first client that needs it."""
        if not self._seer:
            folder = Path(self._opened.enter_context(tempfile.TemporaryDirectory()))
            self._seer = self._opened.enter_context(serving.started(save_seer(folder), folder)).url
        return self._seer

    def _serve_talker(self) -> tuple[str, Path]:
        """The URL of a server of a tiny model, and its checkpoint; started for the first client that needs it."""
        if self._talker is None:
            folder = Path(self._opened.enter_context(tempfile.TemporaryDirectory()))
            checkpoint = serving.save_talker(folder / "talker")
            pooling = "serve.pooler_config.pooling_type=LAST"
            self._talker = self._opened.enter_context(serving.started(checkpoint, folder, pooling)).url, checkpoint
        return self._talker


def check_contracts(python: Path, version: str) -> Verdict:
    """Compare what atom takes of vLLM with its sources."""
    (sources,) = python.parents[1].glob("lib/python*/site-packages/vllm")
    tests = [str(path) for path in sorted((ROOT / "tests").rglob("test_*.py")) if "vllm_sources" in path.read_text()]
    command = [sys.executable, "-m", "pytest", "-q", *tests]
    ended = subprocess.run(command, cwd=ROOT, env=os.environ | {"VLLM_SOURCES": str(sources)}, stdout=sys.stderr)
    fault = "pytest reports what differs" if ended.returncode else ""
    return Verdict("vllm", version, "what atom takes of it", fault)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [*PYTHON, *AI_SDK, *AGENTS]
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(names)} (default: all)")
    parser.add_argument("--newest", action="store_true", help="the newest versions, in place of the pinned ones")
    args = parser.parse_args()
    if unknown := set(args.names) - set(names):
        parser.error(f"there is no {', '.join(sorted(unknown))}; the clients are {', '.join(names)}")
    transformers.utils.logging.disable_progress_bar()  # of checkpoints that are saved
    RECORDS.mkdir(parents=True, exist_ok=True)
    verdicts: list[Verdict] = []
    with contextlib.ExitStack() as opened:
        trial = Trial(args.newest, opened)
        for name in args.names or names:
            found = trial.run(name)
            verdicts += found
            for verdict in found:
                print(f"{name}: {'FAILED' if verdict.fault else 'ok'}", file=sys.stderr, flush=True)
    print(make_table(verdicts))
    return sum(bool(each.fault) for each in verdicts)


if __name__ == "__main__":
    sys.exit(main())
