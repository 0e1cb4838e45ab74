"""Programs that have Triton compile without a GPU, each in a process of its own, without Triton's interpreter.

done = run_program(PROGRAM, "sm_90", TRITON_CACHE_DIR=str(tmp_path))     # done.stdout
done = compile_for_hopper(PROGRAM)                                       # which calls use_hopper; it must succeed
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget

ROOT = Path(__file__).parents[2]
FORKS = """
import json, os, sys, traceback
import torch, triton.compiler  # takes longer than most programs

for line in sys.stdin:
    job = json.loads(line)
    if (pid := os.fork()) == 0:
        code = 1
        try:
            for number, name, flags in ((0, os.devnull, os.O_RDONLY), (1, job["out"], os.O_WRONLY), (2, job["err"], os.O_WRONLY)):
                os.dup2(os.open(name, flags), number)
            os.environ.clear()
            os.environ.update(job["environment"])
            sys.argv, sys.path[:0] = job["argv"], job["path"]
            with open(job["argv"][0]) as file:
                exec(compile(file.read(), job["argv"][0], "exec"), {"__name__": "__main__"})
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush(), sys.stderr.flush()
            os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


class _Driver:
    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


def use_hopper() -> None:
    """Have Triton compile for sm_90 from here on; nothing can be launched."""
    triton.runtime.driver.set_active(_Driver())


@functools.cache
def start_forks() -> subprocess.Popen[str]:
    """The process that programs are forks of, one for all tests: it has imported torch, and ends with this one."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", FORKS]
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def run_program(program: str, *args: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the text of a program in the root of the checkout, with modules from there and from tests/."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | variables
    with tempfile.TemporaryDirectory() as folder:
        file, out, err = (Path(folder, name) for name in ("program.py", "out", "err"))
        for path, text in ((file, program), (out, ""), (err, "")):
            path.write_text(text)
        job = {"argv": [str(file), *args], "path": [str(ROOT), str(ROOT / "tests")], "environment": environment}
        forks = start_forks()
        assert forks.stdin is not None and forks.stdout is not None
        print(json.dumps(job | {"out": str(out), "err": str(err)}), file=forks.stdin, flush=True)
        code = int(forks.stdout.readline())
        return subprocess.CompletedProcess(job["argv"], code, out.read_text(), err.read_text())


def compile_for_hopper(program: str, *args: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a program, which calls `use_hopper`; it must succeed."""
    done = run_program(program, *args, **variables)
    assert done.returncode == 0, done.stderr
    return done
