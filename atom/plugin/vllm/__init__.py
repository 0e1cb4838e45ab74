"""The vLLM plug-in: its entry points.

    [project.entry-points."vllm.general_plugins"]
    atom = "atom.plugin.vllm:register_model"

vLLM calls both in each of its processes, so they import no torch. ATOM_DISABLE_VLLM_PLUGIN=1 turns them off, and so
does a vLLM whose classes are not yet those that atom's model takes: its own models are not to fail by ours.
"""

from __future__ import annotations

import os
import re
from importlib.metadata import PackageNotFoundError, version

from atom.config.model_files import model_files, search_path_of
from atom.errors import AtomError
from atom.process.messages import say

MODEL = "atom.plugin.vllm.model:AtomForCausalLM"
PLATFORM = "atom.plugin.vllm.platform.AtomPlatform"
DISABLE = "ATOM_DISABLE_VLLM_PLUGIN"
OLDEST = (0, 26)  # version of vLLM, as in the extra `vllm`
WITH_IMAGES = "ForConditionalGeneration"  # what names of architectures end with of which atom computes only the text


def register_model() -> None:
    """Have vLLM take atom's model for each architecture of the model files, also for those that it does not know."""
    if is_disabled():
        return
    if is_too_old():
        needed = ".".join(map(str, OLDEST))
        warn(f"atom's need vLLM {needed} or newer, and this is {version('vllm')} (pip install 'atom-run[vllm]')")
        return
    from vllm import ModelRegistry

    for name in architectures():
        ModelRegistry.register_model(name, MODEL)


def register_platform() -> str | None:
    """The name of atom's platform on AMD's GPUs; None on others, for which vLLM's own is right."""
    if is_disabled() or is_too_old():
        return None
    from vllm.platforms import builtin_platform_plugins

    return PLATFORM if builtin_platform_plugins["rocm"]() else None


def architectures() -> list[str]:
    """The architectures that atom computes all of; those with images are left to vLLM."""
    try:
        files = [file for file in model_files(search_path_of(())) if file.spec.get("auto", True)]
    except AtomError as error:  # of a user's package: vLLM, which calls this at every start, goes on
        warn(str(error))
        return []
    names = dict.fromkeys(name for file in files for name in file.spec.get("architectures") or ())
    return [name for name in names if not name.endswith(WITH_IMAGES)]


def warn(why: str) -> None:
    say(f"vLLM runs its own models: {why}; {DISABLE}=1 leaves out this line")


def is_disabled() -> bool:
    return os.environ.get(DISABLE, "") not in ("", "0")


def is_too_old() -> bool:
    """Whether this is a release of vLLM ahead of OLDEST; a build from sources is not one."""
    try:
        given = version("vllm")
    except PackageNotFoundError:
        return False
    found = re.match(r"(\d+)\.(\d+)", given)
    return found is not None and "dev" not in given and tuple(map(int, found.groups())) < OLDEST
