"""What atom takes of vLLM is what vLLM has: the double's signatures against vLLM's sources, which need not be importable.

They are read where vLLM is installed, or from the folder that VLLM_SOURCES names.
"""

from __future__ import annotations

import ast
import inspect
import os
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from plugin import vllm_double as vllm

OURS = sorted((Path(__file__).parents[2] / "atom" / "plugin" / "vllm").glob("*.py"))

CALLS: dict[str, tuple[Callable[..., Any], str]] = {  # module and qualified name -> the double, where vLLM defines it
    "Attention.__init__": (vllm.Attention.__init__, "model_executor/layers/attention/attention.py"),
    "Attention.forward": (vllm.Attention.forward, "model_executor/layers/attention/attention.py"),
    "MLAAttention.__init__": (vllm.MLAAttention.__init__, "model_executor/layers/attention/mla_attention.py"),
    "MLAAttention.forward": (vllm.MLAAttention.forward, "model_executor/layers/attention/mla_attention.py"),
    "ColumnParallelLinear.__init__": (vllm.ColumnParallelLinear.__init__, "model_executor/layers/linear.py"),
    "_ModelRegistry.register_model": (vllm._ModelRegistry.register_model, "model_executor/models/registry.py"),
    "tensor_model_parallel_all_reduce": (vllm.tensor_model_parallel_all_reduce, "distributed/communication_op.py"),
    "tensor_model_parallel_all_gather": (vllm.tensor_model_parallel_all_gather, "distributed/communication_op.py"),
    "get_tensor_model_parallel_rank": (vllm.get_tensor_model_parallel_rank, "distributed/parallel_state.py"),
    "RocmPlatform.apply_config_platform_defaults": (
        vllm.RocmPlatform.apply_config_platform_defaults.__func__, "platforms/rocm.py",
    ),
}  # fmt: skip

FIELDS = {  # of vLLM's configuration, which atom reads or sets
    "ModelConfig": ("config/model.py", vllm.ModelConfig),
    "CacheConfig": ("config/cache.py", vllm.CacheConfig),
    "ParallelConfig": ("config/parallel.py", vllm.ParallelConfig),
    "CompilationConfig": ("config/compilation.py", vllm.CompilationConfig),
    "VllmConfig": ("config/vllm.py", vllm.VllmConfig),
}

MODEL = {  # what vLLM calls a model with, by keyword
    "__init__": ("vllm_config", "prefix"),
    "forward": ("input_ids", "positions", "intermediate_tensors", "inputs_embeds"),
    "embed_input_ids": ("input_ids",),
    "compute_logits": ("hidden_states",),
}


@cache
def sources() -> Path:
    """vLLM's package, not imported."""
    stated, found = os.environ.get("VLLM_SOURCES"), find_spec("vllm")
    if stated is None and (found is None or found.origin is None):
        pytest.skip("vLLM is not installed, and VLLM_SOURCES names no folder")
    return Path(stated) if stated else Path(str(found.origin)).parent  # type: ignore[union-attr]


@cache
def tree(file: str) -> ast.Module:
    return ast.parse((sources() / file).read_text())


def find(file: str, name: str) -> Any:
    """The definition of a class, a function or a method."""
    node: Any = tree(file)
    for part in name.split("."):
        node = next(each for each in node.body if getattr(each, "name", None) == part)
    return node


def parameters_of(function: ast.FunctionDef) -> list[tuple[str, str, bool]]:
    """Name, kind, and whether there is a default."""
    args, kinds = function.args, inspect.Parameter
    positional = [*args.posonlyargs, *args.args]
    has = [False] * (len(positional) - len(args.defaults)) + [True] * len(args.defaults)
    made = [(arg.arg, kinds.POSITIONAL_OR_KEYWORD.name, own) for arg, own in zip(positional, has, strict=True)]
    made += [(args.vararg.arg, kinds.VAR_POSITIONAL.name, False)] if args.vararg else []
    pairs = zip(args.kwonlyargs, args.kw_defaults, strict=True)
    made += [(arg.arg, kinds.KEYWORD_ONLY.name, default is not None) for arg, default in pairs]
    return made + ([(args.kwarg.arg, kinds.VAR_KEYWORD.name, False)] if args.kwarg else [])


@pytest.mark.parametrize("name", CALLS)
def test_signatures_are_those_of_vllm(name: str):
    double, file = CALLS[name]
    own = inspect.signature(double).parameters.values()
    ours = [(each.name, each.kind.name, each.default is not each.empty) for each in own]
    assert parameters_of(find(file, name)) == ours


@pytest.mark.parametrize("name", FIELDS)
def test_fields_are_those_of_vllm(name: str):
    file, double = FIELDS[name]
    definition = find(file, name)
    names = {each.target.id for each in definition.body if isinstance(each, ast.AnnAssign)}
    names |= {each.name for each in definition.body if isinstance(each, ast.FunctionDef)}  # properties
    names |= {
        each.attr
        for each in ast.walk(definition)
        if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store)
    }
    assert set(double.__annotations__) <= names


def test_members_and_entry_points_are_those_of_vllm():
    for enum in (vllm.CompilationMode, vllm.CUDAGraphMode):
        assigned = {
            target.id: ast.literal_eval(each.value) if not isinstance(each.value, ast.Tuple) else None
            for each in find("config/compilation.py", enum.__name__).body
            if isinstance(each, ast.Assign)
            for target in each.targets
            if isinstance(target, ast.Name)
        }
        assert {member.name for member in enum} <= assigned.keys()
        numbers = {member.name: member.value for member in enum if isinstance(member.value, int)}
        assert {name: assigned[name] for name in numbers} == numbers
    assert any(
        isinstance(node, ast.Assign)
        and [getattr(each, "id", None) for each in node.targets] == ["builtin_platform_plugins"]
        for node in tree("platforms/__init__.py").body
    )
    text = (sources() / "plugins" / "__init__.py").read_text()
    assert '"vllm.general_plugins"' in text and '"vllm.platform_plugins"' in text
    layers = (sources() / "model_executor" / "layers" / "attention" / "__init__.py").read_text()
    assert "Attention" in layers and "MLAAttention" in layers


def test_the_model_has_methods_with_these_keywords():
    with vllm.installed():
        from atom.plugin.vllm.model import AtomForCausalLM
    for name, keywords in MODEL.items():
        assert set(keywords) <= inspect.signature(getattr(AtomForCausalLM, name)).parameters.keys()


def test_these_are_the_methods_that_vllm_asks_for():
    asked = {
        each.name: [arg.arg for arg in each.args.args if arg.arg != "self"]
        for protocol in ("VllmModel", "VllmModelForTextGeneration")
        for each in find("model_executor/models/interfaces_base.py", protocol).body
        if isinstance(each, ast.FunctionDef)
    }
    for name, keywords in asked.items():
        assert set(keywords) <= set(MODEL[name])


def test_all_that_atom_imports_of_vllm_is_in_the_double():
    found = {
        (node.module, alias.name)
        for path in OURS
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm"
        for alias in node.names
    }
    assert found and all(name in vllm.MODULES[module] for module, name in found)


def test_nothing_of_vllm_is_replaced():
    """No attribute of a module or class of vLLM is assigned; atom registers, derives and calls."""
    for path in OURS:
        module = ast.parse(path.read_text())
        taken = {
            alias.asname or alias.name
            for node in ast.walk(module)
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm"
            for alias in node.names
        }
        for node in ast.walk(module):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name):
                assert node.value.id not in taken, f"{path}:{node.lineno}"
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id != "setattr", f"{path}:{node.lineno}"
