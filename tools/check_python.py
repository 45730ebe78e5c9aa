"""Exit with one line on stderr unless pyproject.toml allows this Python. Any Python 3 runs it: no f-strings."""

import os
import re
import sys

with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), os.pardir, "pyproject.toml")) as file:
    needed = re.search(r'^requires-python = "(.*)"', file.read(), re.MULTILINE).group(1)  # type: ignore[union-attr]

for operator, version in re.findall(r"(>=|<)\s*([\d.]+)", needed):
    bound = tuple(int(part) for part in version.split("."))
    if (sys.version_info[: len(bound)] >= bound) != (operator == ">="):
        found = ".".join(str(part) for part in sys.version_info[:3])
        message = "expected Python %s, got %s, which is Python %s; choose another, as in make demo PYTHON=python3.12\n"
        sys.stderr.write(message % (needed, sys.executable, found))
        sys.exit(1)
