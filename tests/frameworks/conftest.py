"""Recipes are tested as users copy them: from examples/ and from docs/frameworks.md."""

import importlib.util
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def example() -> Callable[[str], ModuleType]:
    """Returns a function from the name of an example to its module."""

    def load(name: str) -> ModuleType:
        module_name = f"example_{Path(name).stem}"
        if module_name not in sys.modules:
            spec = importlib.util.spec_from_file_location(module_name, ROOT / "examples" / name)
            assert spec and spec.loader
            module = importlib.util.module_from_spec(spec)
            sys.modules[module_name] = module  # where pickle looks for its classes
            spec.loader.exec_module(module)
        return sys.modules[module_name]

    return load


@pytest.fixture
def recipe() -> Callable[..., dict[str, Any]]:
    """Returns a function that runs the code below a heading of docs/frameworks.md."""
    text = (ROOT / "docs" / "frameworks.md").read_text()

    def run(heading: str, **names: Any) -> dict[str, Any]:
        section = re.search(rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", text, re.M | re.S)
        assert section, f"no heading {heading!r}"
        blocks = re.findall(r"^```python\n(.*?)^```", section[1], re.M | re.S)
        assert blocks, f"no code below {heading!r}"
        exec("\n".join(blocks), names)
        return names

    return run
