"""Find plug-ins: functions, backends and folders of users' packages.

    rewrite = find_function("my_passes:clip_gates", PASSES)     # or by the name of an entry point in that group
    digest_of("my_passes")                                      # changes with each file that the module is made of

Modules are found where Python finds them, then in the current folder.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from atom.cache import digest
from atom.errors import ConfigError, first_line

PASSES = "atom.passes"  # groups of entry points: functions that rewrite a graph
CONF = "atom.conf"  # packages with folders like those of conf/
BACKENDS = "atom.backends"  # kernels: a `Backend`


@cache
def named(group: str) -> dict[str, str]:
    """Plug-ins of installed packages: `module:function` or a package, by the name of the entry point."""
    return {each.name: each.value for each in entry_points(group=group)}


def find_function(spec: str, group: str) -> Callable[..., Any]:
    """The function of `module:function`, or of an entry point. ConfigError if there is none."""
    module, name = split_function(spec, group)
    function = getattr(import_module(module), name, None)
    if not callable(function) or not hasattr(function, "__name__"):
        raise ConfigError(f"{module} has no function {name}")
    return function  # type: ignore[no-any-return]


def split_function(spec: str, group: str) -> tuple[str, str]:
    """The module and the name of a function. ConfigError if neither is given and there is no such entry point."""
    module, _, name = named(group).get(spec, spec).partition(":")
    if not module or not name:
        there = ", ".join(named(group)) or "none"
        raise ConfigError(f"{spec} is not an entry point of {group} (known: {there}); or write module:function")
    return module, name


def check_module(spec: str, group: str) -> None:
    """Look for a function's module without importing it. ConfigError if there is none."""
    top = split_function(spec, group)[0].partition(".")[0]
    look_here()
    if top not in sys.modules and importlib.util.find_spec(top) is None:
        raise ConfigError(f"there is no module {top}; {where_to_put(top)}")


def where_to_put(module: str) -> str:
    """What to do if there is no such module."""
    return f"install it, or start in the folder that has {module}.py"


@contextmanager
def naming(what: str) -> Iterator[None]:
    """Let ConfigErrors begin with what they are about."""
    try:
        yield
    except ConfigError as error:
        error.args = (f"{what}: {error}",)
        raise


def find_value(name: str, group: str) -> Any:
    """Import the object of an entry point, `module:NAME`. ConfigError if it does not exist."""
    module, _, value = named(group)[name].partition(":")
    found = getattr(import_module(module), value, None) if value else None
    if found is None:
        raise ConfigError(f"{group}: {name} = {named(group)[name]}: there is no such module:NAME")
    return found


def package_folders() -> list[Path]:
    """The folders like conf/ that installed packages plug in. ConfigError if one is missing or has no YAML files."""
    return [find_folder(name, package) for name, package in named(CONF).items()]


@cache
def find_folder(name: str, package: str) -> Path:
    try:
        spec = importlib.util.find_spec(package)
    except Exception as error:  # it is the user's code, as is the package around it
        raise ConfigError(f"{CONF}: {name} = {package}: {type(error).__name__}: {first_line(error)}") from error
    folders = map(Path, (spec and spec.submodule_search_locations) or ())
    if found := next((folder for folder in folders if any(folder.glob("*/*.yaml"))), None):
        return found
    wrong = "it has no YAML files in model/ or tool_calls/" if spec else "there is no such package"
    raise ConfigError(f"{CONF}: {name} = {package}: {wrong}; "
                      "do its YAML files belong to the package's data ([tool.setuptools.package-data])?")  # fmt: skip


def import_module(name: str) -> ModuleType:
    """Import a user's module. ConfigError says why it cannot be imported."""
    look_here()
    try:
        return importlib.import_module(name)
    except Exception as error:  # it is the user's code
        raise ConfigError(f"cannot import {name} ({type(error).__name__}: {first_line(error)})") from error


def look_here() -> None:
    """Let Python find modules in the current folder too."""
    if (folder := os.getcwd()) not in sys.path:
        sys.path.append(folder)


def module_of(spec: str, group: str) -> str:
    """The name of the module that a function is in."""
    return named(group).get(spec, spec).partition(":")[0]


def digest_of(module: str) -> str:
    """A digest of the files of a module: its whole package, or it and what it has imported of its own folder."""
    top = import_module(module.partition(".")[0])
    import_module(module)
    if hasattr(top, "__path__"):
        files = {file for folder in top.__path__ for file in Path(folder).rglob("*.py")}
    else:
        files = with_imports(file_of(top))
    if not files:
        raise ConfigError(f"{module} is no Python source, so a change of it could not be detected")
    root = os.path.commonpath(files)
    return digest("".join(f"{file.relative_to(root)}\n{file.read_text()}" for file in sorted(files)))


def with_imports(file: Path) -> set[Path]:
    """A source file and those next to it that it imports, by its text: not by what a process happens to have loaded."""
    found, waiting = set[Path](), [file]
    while waiting:
        each = waiting.pop()
        if each in found or each.suffix != ".py" or not each.is_file():
            continue
        found.add(each)
        for node in ast.walk(ast.parse(each.read_bytes())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
            waiting += [file.with_name(f"{name}.py") for name in names]
    return found


def file_of(module: ModuleType) -> Path:
    return Path(module.__file__ or "").absolute()
