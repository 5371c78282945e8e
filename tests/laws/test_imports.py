"""The law *imports*: imports only point down the layout, and what must not be known is not imported."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "jaxscale"

LAYOUT = (
    "__main__",
    "cli",
    "launch",
    "plan",
    "train.run",
    "train.bench",
    "train.tell",
    "train.sample",
    "train.evaluate",
    "train.build",
    "train.hooks",
    "train.loop",
    "train",
    "report",
    "runtime",
    "interop",
    "data.feed",
    "data.describe",
    "data.loader",
    "data",
    "model",
    "parallel",
    "cluster",
    "precision",
    "hardware",
    "flops",
    "config",
    "",
)
"""From top to bottom; a module's place is the longest entry that its name begins with. `train` is the rest of it."""

FORBIDDEN = {
    "train.step": ("jaxscale.runtime", "jaxscale.data", "jaxscale.cluster", "time", "logging", "pathlib", "os"),
    "train.loop": ("jaxscale.model", "jaxscale.parallel", "jaxscale.cluster", "jaxscale.runtime", "optax", "flax"),
    "report": ("jax", "flax", "orbax"),
    "config": ("jax", "flax", "numpy"),
    "data": ("jax", "grain"),
    "model": ("jaxscale.cluster", "optax"),
    "interop": ("torch", "transformers", "jaxscale.train"),
    "runtime": ("jaxscale.model", "optax", "flax"),
}
"""What a part must not know, beyond its place."""
KNOWS_JAX = ("data.feed", "data.loader")
"""The two modules of `data` that may."""

MODULES = sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))


def name_of(path: Path) -> str:
    """Dotted name below the package; "" for the package itself."""
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__").removesuffix("__init__")


def place(name: str) -> int:
    """Line of the layout that a module stands on."""
    fitting = [entry for entry in LAYOUT if name == entry or name.startswith(f"{entry}.")]
    assert fitting, f"{name} has no place in the layout"
    return LAYOUT.index(max(fitting, key=len))


def imports(path: Path) -> set[str]:
    """All modules that a file imports, anywhere in it; relative imports do not occur."""
    found = set()
    for node in ast.walk(ast.parse((PACKAGE / path).read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{path}: relative import"
            submodules = {
                alias.name for alias in node.names if (PACKAGE.parent / node.module.replace(".", "/")).is_dir()
            }
            found |= {node.module} | {f"{node.module}.{name}" for name in submodules}
    return found


@pytest.mark.parametrize("path", MODULES, ids=str)
def test_imports_point_down(path: Path) -> None:
    """A module imports its own line of the layout, or lines below."""
    own = place(name_of(path))
    for imported in imports(path):
        if imported.startswith("jaxscale."):
            module = imported.removeprefix("jaxscale.")
            if (PACKAGE / module.replace(".", "/")).exists() or (PACKAGE / f"{module.replace('.', '/')}.py").exists():
                assert place(module) >= own, f"{name_of(path)} imports {module}, which stands above it"


@pytest.mark.parametrize("part", FORBIDDEN)
def test_what_a_part_must_not_know(part: str) -> None:
    """No module of the part imports what the layout keeps from it."""
    paths = [path for path in MODULES if name_of(path) == part or name_of(path).startswith(f"{part}.")]
    assert paths
    for path in paths:
        if name_of(path) in KNOWS_JAX:
            continue
        for imported in imports(path):
            for forbidden in FORBIDDEN[part]:
                assert not f"{imported}.".startswith(f"{forbidden}."), f"{path} imports {imported}"


def test_files_are_short() -> None:
    """No file above 400 lines; step.py and loop.py below 150 each."""
    lines = {name_of(path): len((PACKAGE / path).read_text().splitlines()) for path in MODULES}
    assert {name: count for name, count in lines.items() if count > 400} == {}
    assert max(lines["train.step"], lines["train.loop"]) < 150


def test_only_one_place_makes_partition_specs() -> None:
    """PartitionSpec is made in parallel/sharding.py alone."""
    makers = [name_of(path) for path in MODULES if "PartitionSpec" in (PACKAGE / path).read_text()]
    assert makers == ["parallel.sharding"]
