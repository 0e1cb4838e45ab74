"""The tables of flags in docs/ are those of the parser; `scripts/test --update-golden` writes them anew."""

from __future__ import annotations

import pytest
from entrypoints.rocm_flags import FLAGS
from generated import check_block

from atom.config.schema import Config
from atom.config.schema_keys import keys
from atom.config.transformers_words import FROM_TRANSFORMERS
from atom.entrypoints.args import ROCM, VLLM, describe
from atom.entrypoints.openai_server import ServerArgs
from atom.entrypoints.refused_flags import ROCM_REFUSED, VLLM_REFUSED, refused, with_dashes
from atom.jobs.flags import LLAMA_CPP


def refused_of_rocm() -> dict[str, str]:
    """Its own flags that are refused, and those of its that vLLM has, too; by reason."""
    reasons: dict[str, str] = {}
    for name, reason in [*refused(ROCM_REFUSED), *refused(VLLM_REFUSED)]:
        if name in FLAGS.split():
            reasons[reason] = f"{reasons.get(reason, '')} {name}"
    return reasons


PAGES = {"from-vllm.md": (VLLM, VLLM_REFUSED), "from-rocm-atom.md": (ROCM, refused_of_rocm())}


def tables(of: str, reasons: dict[str, str]) -> str:
    """The flags that are taken, with the field that each sets, and those that are refused."""
    lines = ["| flag | field | meaning |", "|---|---|---|"]
    for name, _, flag in ServerArgs.flags():
        if of in flag.of:
            names = [f"--{name.replace('_', '-')}", *([flag.short] if flag.short else [])]
            field = f"`{flag.key}`" if flag.key else ""
            lines.append(f"| {', '.join(f'`{each}`' for each in names)} | {field} | {describe(flag)} |")
    lines += ["", "Refused:", "", "| flag | instead |", "|---|---|"]
    for reason, names in reasons.items():
        spelled = ", ".join(f"`{with_dashes(name)}`" for name in names.split())
        lines.append(f"| {spelled} | {reason} |")
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("page", PAGES)
def test_the_tables_of_a_page_are_those_of_the_parser(page: str, request: pytest.FixtureRequest):
    check_block(page, "flags", tables(*PAGES[page]), request)


def test_the_table_of_llama_cpps_flags_is_that_of_the_parser(request: pytest.FixtureRequest):
    lines = ["| llama.cpp | here |", "|---|---|"]
    for flags, write in LLAMA_CPP.items():
        file = "@ before a file's name in " if "@" in write else ""
        meant = f"{file}`{write.partition('=')[0] if '{}' in write else write}`" if write else "nothing is needed"
        lines.append(f"| {', '.join(f'`{flag}`' for flag in flags.split())} | {meant} |")
    check_block("from-llama-cpp.md", "flags", "\n".join(lines) + "\n", request)


def test_the_table_of_transformers_arguments_is_that_of_the_errors(request: pytest.FixtureRequest):
    lines = ["| transformers | here |", "|---|---|"]
    for names, hint in FROM_TRANSFORMERS.items():
        lines.append(f"| {', '.join(f'`{name}`' for name in names.split())} | {hint} |")
    check_block("from-transformers.md", "arguments", "\n".join(lines) + "\n", request)


@pytest.mark.parametrize("write", [write for write in LLAMA_CPP.values() if write])
def test_what_is_written_for_a_flag_of_llama_cpp_is_a_field(write: str):
    name = write.partition("=")[0]
    assert name in keys(Config) or name in ("job", "OMP_NUM_THREADS")


def test_the_guides_flags_are_all_rocm_atoms():
    """What ROCm/ATOM's serving guide names."""
    of = {name for name, _, flag in ServerArgs.flags() if ROCM in flag.of}
    guide = (
        "model kv_cache_dtype host server_port tensor_parallel_size method num_speculative_tokens torch_profiler_dir"
    )
    assert set(guide.split()) <= of
