#!/usr/bin/env bash
# In Triton 3.6 each signature of kernels has a launcher: an extension that is compiled and loaded, always under the
# name `__triton_launcher`. One might take two loaded launchers for two modules. They are that only until one of the
# files is loaded again: CPython, for an extension with single-phase initialization (m_size -1), then writes that
# file's functions into whichever module bore the name last. So a thread that has loaded its launcher and is about to
# read `launch` from it can get another kernel's, if a second thread loads a known one meanwhile.
# Shown without a GPU, in order, through the function that the launchers go through.
# Seen with 3.6.0 and Python 3.11: "before: 1 2", "after the first is loaded again: 1 1".
# 3.8.0 has one launcher for all kernels, so its own are safe; the loading function is as it was.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat >"$folder/program.py" <<'P'
import triton
from triton.runtime.build import compile_module_from_src

SOURCE = """
#include <Python.h>
static PyObject* launch(PyObject* self, PyObject* args) { return PyLong_FromLong(NUMBER); }
static PyMethodDef methods[] = {{"launch", launch, METH_NOARGS, ""}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "__triton_launcher", NULL, -1, methods};
PyMODINIT_FUNC PyInit___triton_launcher(void) { return PyModule_Create(&module); }
"""


def load(number: int):
    return compile_module_from_src(SOURCE.replace("NUMBER", str(number)), "__triton_launcher")


first, second = load(1), load(2)
before = first.launch(), second.launch()
load(1)
after = first.launch(), second.launch()
print(triton.__version__, "before:", *before, "after the first is loaded again:", *after)
raise SystemExit((before, after) != ((1, 2), (1, 1)))
P
for version in 3.6.0 3.8.0; do
  python3 -m venv "$folder/$version"
  "$folder/$version/bin/pip" install --quiet --disable-pip-version-check "triton==$version" setuptools
  TRITON_CACHE_DIR="$folder/cache-$version" "$folder/$version/bin/python" "$folder/program.py"
done
