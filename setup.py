"""README.md as an index shows it: without links to files, which only the repository has.

The rest is in pyproject.toml.
"""

import re
from pathlib import Path

from setuptools import setup

README = (Path(__file__).parent / "README.md").read_text(encoding="utf-8")

setup(
    long_description=re.sub(r"\[([^][]*)\]\((?!\w+:)[^)\s]*\)", r"\1", README),
    long_description_content_type="text/markdown",
)
