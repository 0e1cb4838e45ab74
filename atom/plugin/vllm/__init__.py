"""The plug-in for vLLM: what its entry points name.

    [project.entry-points."vllm.general_plugins"]
    atom = "atom.plugin.vllm:register_model"

vLLM calls both in each of its processes, so they import no torch. ATOM_DISABLE_VLLM_PLUGIN=1 turns them off.
"""

from __future__ import annotations

import os

from atom.config.hydra import model_files, search_path_of

MODEL = "atom.plugin.vllm.model:AtomForCausalLM"
PLATFORM = "atom.plugin.vllm.platform.AtomPlatform"
WITH_IMAGES = "ForConditionalGeneration"  # what names of architectures end with whose text alone atom computes


def register_model() -> None:
    """Have vLLM take atom's model for each architecture of the model files, also for those that it does not know."""
    if is_disabled():
        return
    from vllm import ModelRegistry

    for name in architectures():
        ModelRegistry.register_model(name, MODEL)


def register_platform() -> str | None:
    """The name of atom's platform on AMD's GPUs; None on others, where vLLM's own is the right one."""
    if is_disabled():
        return None
    from vllm.platforms import builtin_platform_plugins

    return PLATFORM if builtin_platform_plugins["rocm"]() else None


def architectures() -> list[str]:
    """The architectures that atom computes all of; those with images are left to vLLM."""
    files = (file for file in model_files(search_path_of(())) if file.spec.get("auto", True))
    names = dict.fromkeys(name for file in files for name in file.spec.get("architectures") or ())
    return [name for name in names if not name.endswith(WITH_IMAGES)]


def is_disabled() -> bool:
    return os.environ.get("ATOM_DISABLE_VLLM_PLUGIN", "") not in ("", "0")
