"""Before anything is collected: one download for all processes, the tests' own markers, and one thread."""

import inspect
import re
from pathlib import Path

import pytest
import torch
from transformers import testing_utils

from tools.transformers_suite import sources


def pytest_configure(config: pytest.Config) -> None:
    files = [*sources.fetch().glob("*/test_*.py"), Path(inspect.getfile(testing_utils))]
    for name in {name for file in files for name in re.findall(r"\bmark\.(\w+)", file.read_text())}:
        config.addinivalue_line("markers", f"{name}: of transformers")
    torch.set_num_threads(1)  # the models are tiny
