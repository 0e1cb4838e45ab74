"""Serve a tiny model, and run try_clients.py against it in another environment.

The exit status is how many clients failed.

.venv/bin/python scripts/test_clients.py [--python PYTHON] [NAME …]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="of packages (default: all)")
    parser.add_argument("--python", default=sys.executable, help="of the environment that has the clients")
    args = parser.parse_args()
    sys.path.insert(0, str(ROOT / "tests"))
    import serving

    with tempfile.TemporaryDirectory() as folder:
        talker = serving.save_talker(Path(folder, "talker"))
        server = serving.start(talker, Path(folder), "serve.pooler_config.pooling_type=LAST")
        try:
            environment = os.environ | {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}  # it would fetch prices
            command = [args.python, str(ROOT / "scripts" / "try_clients.py"), server.url, str(talker), *args.names]
            return subprocess.run(command, env=environment, timeout=900).returncode
        finally:
            server.process.kill()
            server.process.wait()


if __name__ == "__main__":
    sys.exit(main())
