from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from atom.process.child_process import end, exit_status, start_python


def test_a_child_has_its_environment_and_arguments_and_keeps_its_number_until_it_is_ended():
    code = "import os, sys; print(os.environ['FOR_CHILD'], *sys.argv[1:]); sys.exit(3)"
    child = start_python(code, "a", "b", stderr=subprocess.DEVNULL, FOR_CHILD="x=y")
    assert child.stdout is not None and child.stdout.read() == b"x=y a b\n"
    assert exit_status(child) == 3 and child.returncode is None
    assert end(child) == 3


def test_a_fork_has_what_this_process_imported_and_ends_with_its_own_code():
    code = """
import os, signal, socket, sys
from atom.process.child_process import end, exit_status, fork

def work():
    print("xmlrpc" in sys.modules, os.getpgrp() == os.getpid(), repr(sys.stdin.read()), file=sys.stderr, flush=True)
    return 3

import xmlrpc
child = fork(work, is_piped=True)
print(child.stderr.read().strip(), exit_status(child), end(child), end(child))
child = fork(lambda: signal.pause() or 0, is_piped=False)
print(child.stderr, exit_status(child, os.WNOHANG), end(child))
"""
    done = subprocess.run([sys.executable, "-c", code], input="mine", capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == ["True True '' 3 3 3", "None None -9"], done.stderr


def test_what_a_child_has_started_ends_with_it():
    code = "import subprocess; print(subprocess.Popen(['sleep', '600']).pid, flush=True); input()"
    child = start_python(code, stderr=subprocess.DEVNULL)
    assert child.stdout is not None
    started = int(child.stdout.readline())
    assert exit_status(child, os.WNOHANG) is None
    assert end(child) == end(child) == -signal.SIGKILL
    for _ in range(500):
        try:
            with open(f"/proc/{started}/stat") as file:
                if file.read().rpartition(")")[2].split()[0] == "Z":
                    break
        except (FileNotFoundError, ProcessLookupError):
            break
        time.sleep(0.01)
    else:
        raise AssertionError(f"{started} still runs")
