"""What atom gives and reads of vLLM is what vLLM takes and has, by its sources (`vllm_sources`), which are not imported.

What atom gives is what the double takes, which knows nothing else. What vLLM has besides has to be optional.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from plugin import vllm_double as vllm
from vllm_sources import sources, tree

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
    "get_tensor_model_parallel_world_size": (
        vllm.get_tensor_model_parallel_world_size, "distributed/parallel_state.py",
    ),
    "RocmPlatform.apply_config_platform_defaults": (
        vllm.RocmPlatform.apply_config_platform_defaults.__func__, "platforms/rocm.py",
    ),
}  # fmt: skip

EXTRA = {"Attention.__init__": {"sinks": "v1/attention/backends/flash_attn.py"}}  # which vLLM hands on to a backend

FIELDS = {  # of vLLM's configuration and layers, which atom reads or sets
    "ModelConfig": ("config/model.py", vllm.ModelConfig),
    "CacheConfig": ("config/cache.py", vllm.CacheConfig),
    "ParallelConfig": ("config/parallel.py", vllm.ParallelConfig),
    "CompilationConfig": ("config/compilation.py", vllm.CompilationConfig),
    "SchedulerConfig": ("config/scheduler.py", vllm.SchedulerConfig),
    "LoadConfig": ("config/load.py", vllm.LoadConfig),
    "DeviceConfig": ("config/device.py", vllm.DeviceConfig),
    "VllmConfig": ("config/vllm.py", vllm.VllmConfig),
}

LAYERS = {  # their attributes that atom reads
    "MLAAttention": ("model_executor/layers/attention/mla_attention.py", {"kv_b_proj", "v_head_dim"}),
}

MODEL = {  # what vLLM calls a model with, by keyword
    "__init__": ("vllm_config", "prefix"),
    "forward": ("input_ids", "positions", "intermediate_tensors", "inputs_embeds"),
    "embed_input_ids": ("input_ids",),
    "compute_logits": ("hidden_states",),
}


def find(file: str, name: str) -> Any:
    """The definition of a class, a function or a method."""
    node: Any = tree(file)
    for part in name.split("."):
        node = next(each for each in node.body if getattr(each, "name", None) == part)
    return node


def signature_of(function: ast.FunctionDef) -> inspect.Signature:
    """Its names, kinds and whether there are defaults, which are all None here."""
    args, kinds, none = function.args, inspect.Parameter, inspect.Parameter.empty
    positional = [*args.posonlyargs, *args.args]
    is_needed = [True] * (len(positional) - len(args.defaults)) + [False] * len(args.defaults)
    found = [
        inspect.Parameter(arg.arg, kinds.POSITIONAL_OR_KEYWORD, default=none if needed else None)
        for arg, needed in zip(positional, is_needed, strict=True)
    ]
    found += [inspect.Parameter(args.vararg.arg, kinds.VAR_POSITIONAL)] if args.vararg else []
    found += [
        inspect.Parameter(arg.arg, kinds.KEYWORD_ONLY, default=none if default is None else None)
        for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True)
    ]
    found += [inspect.Parameter(args.kwarg.arg, kinds.VAR_KEYWORD)] if args.kwarg else []
    return inspect.Signature(found)


def find_faults(given: inspect.Signature, taken: inspect.Signature) -> list[str]:
    """Why a function with the signature `taken` cannot be called with the parameters of `given`.

    Those of `given` stand for the arguments: by position, or by keyword; one with a default is not always given.
    """
    kinds = inspect.Parameter
    variable = (kinds.VAR_POSITIONAL, kinds.VAR_KEYWORD)
    named = {name: each for name, each in taken.parameters.items() if each.kind not in variable}
    ahead = [name for name, each in given.parameters.items() if each.kind is not kinds.KEYWORD_ONLY]
    first = [name for name, each in named.items() if each.kind is kinds.POSITIONAL_OR_KEYWORD][: len(ahead)]
    faults = [] if first == ahead else [f"{ahead} by position are {first}"]
    keywords = given.parameters.keys() - set(ahead)
    faults += [f"{name} is not taken" for name in sorted(keywords - (named.keys() - set(first)))]
    always = {name for name, each in given.parameters.items() if each.default is each.empty}
    needed = {name for name, each in named.items() if each.default is each.empty}
    return faults + [f"{name} is needed" for name in sorted(needed - always - set(first))]


@pytest.mark.parametrize(
    ("taken", "faults"),
    [
        ("a, b, c, d=1", []),
        ("a, b, e=1, *more, d=1, c, **others", []),
        ("b, a, c, d=1", ["['a', 'b'] by position are ['b', 'a']"]),
        ("a, b, c, d, e", ["d is needed", "e is needed"]),
        ("a, b, **others", ["c is not taken", "d is not taken"]),
        ("a, *, b, c, d=1", ["['a', 'b'] by position are ['a']"]),
    ],
)
def test_a_call_that_a_function_does_not_take_is_found(taken: str, faults: list[str]):
    def call(a: int, b: int, /, *, c: int, d: int = 0) -> None: ...

    (function,) = ast.parse(f"def f({taken}): ...").body
    assert isinstance(function, ast.FunctionDef)
    assert find_faults(inspect.signature(call), signature_of(function)) == faults


@pytest.mark.parametrize("name", CALLS)
def test_vllm_takes_what_atom_gives(name: str):
    double, file = CALLS[name]
    given, extra = inspect.signature(double), EXTRA.get(name, {})
    plain = given.replace(parameters=[each for each in given.parameters.values() if each.name not in extra])
    taken = signature_of(find(file, name))
    assert find_faults(plain, taken) == []
    assert not extra or any(each.kind is each.VAR_KEYWORD for each in taken.parameters.values())
    for keyword, backend in extra.items():
        (impl,) = (each for each in tree(backend).body if getattr(each, "name", "").endswith("Impl"))
        assert keyword in signature_of(find(backend, f"{impl.name}.__init__")).parameters  # type: ignore[attr-defined]


def test_the_platforms_method_takes_what_vllm_gives():
    with vllm.installed():
        from atom.plugin.vllm.platform import AtomPlatform
    asked = find("platforms/interface.py", "Platform.apply_config_platform_defaults")
    own = inspect.signature(AtomPlatform.apply_config_platform_defaults.__func__)
    assert list(own.parameters) == list(signature_of(asked).parameters)


@pytest.mark.parametrize("name", FIELDS)
def test_fields_are_those_of_vllm(name: str):
    file, double = FIELDS[name]
    assert set(double.__annotations__) <= attributes_of(find(file, name))


@pytest.mark.parametrize("name", LAYERS)
def test_attributes_of_layers_are_those_of_vllm(name: str):
    file, names = LAYERS[name]
    assert names <= attributes_of(find(file, name))


def attributes_of(definition: ast.ClassDef) -> set[str]:
    """The fields and properties of a class, and what its methods set."""
    names = {
        each.target.id
        for each in definition.body
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
    }
    names |= {each.name for each in definition.body if isinstance(each, ast.FunctionDef)}  # properties
    return names | {
        each.attr
        for each in ast.walk(definition)
        if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store)
    }


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
    """A method of a protocol that has a body may be left out."""
    asked = {
        each.name: [arg.arg for arg in each.args.args if arg.arg != "self"]
        for protocol in ("VllmModel", "VllmModelForTextGeneration")
        for each in find("model_executor/models/interfaces_base.py", protocol).body
        if isinstance(each, ast.FunctionDef) and ast.unparse(each.body[-1]) == "..."
    }
    assert asked.keys() == MODEL.keys()
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
