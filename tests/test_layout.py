"""The layout of the repository: links, who may import whom, and what a module must have."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from mypy.find_sources import create_source_list
from mypy.options import Options

ROOT = Path(__file__).parents[1].resolve()
PACKAGE = ROOT / "dcr_stream"
LINKED = ("stages", "transports", "gate")
MAX_LINES = 400

PLAIN = frozenset({"errors", "canonical", "delta", "messages", "protocol"})
SHARED = PLAIN | {"interfaces"}
CORE = SHARED | {"codec", "runtime", "flow", "trace", "sources", "loaders", "commit", "control", "roles"}
PUBLIC = CORE | {*LINKED, "front"}

# docs/design/architecture.md, rooms: what a room may import besides itself. `roles` are the single modules of the
# core that no other room claims; the package's `__init__` belongs to `front` and imports on first use.
MAY_IMPORT: Mapping[str, frozenset[str]] = {
    **dict.fromkeys(PLAIN, PLAIN),
    "interfaces": PLAIN,
    "codec": PLAIN,
    "runtime": SHARED,
    "flow": SHARED | {"runtime"},
    "trace": SHARED | {"codec"},
    "sources": SHARED | {"codec", "trace"},
    "loaders": SHARED | {"codec", "trace"},
    "commit": SHARED,
    "control": SHARED,
    "roles": CORE,
    "stages": SHARED | {"codec", "flow"},
    "transports": SHARED | {"control"},
    "gate": SHARED,
    "front": CORE | {*LINKED},
    "testing": PUBLIC,
    "cli": PUBLIC | {"testing", "integrations"},
    "integrations": PUBLIC,
}


@dataclass(frozen=True)
class Import:
    """One imported module of the package; ``names`` are what is taken from it, ``at_load`` whether loading needs it."""

    module: str
    names: tuple[str, ...]
    at_load: bool


@dataclass(frozen=True)
class Module:
    """One module of the package, parsed."""

    name: str
    path: Path

    @cached_property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @property
    def room(self) -> str:
        first = self.name.split(".")[1]
        return first if first in MAY_IMPORT or (PACKAGE / first).is_dir() else "roles"

    @property
    def exported(self) -> frozenset[str] | None:
        """The names in ``__all__``, None without one."""
        for node in self.tree.body:
            if isinstance(node, ast.Assign) and any(
                isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets
            ):
                names: list[str] = ast.literal_eval(node.value)
                return frozenset(names)
        return None

    @cached_property
    def imports(self) -> tuple[Import, ...]:
        """What it imports from the package, anywhere in the module."""
        return tuple(_imports(self.tree, at_load=True))


def _imports(node: ast.AST, at_load: bool) -> Iterator[Import]:
    if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
        at_load = False
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        at_load = False
    if isinstance(node, ast.Import):
        yield from (Import(alias.name, (), at_load) for alias in node.names if _ours(alias.name))
    elif isinstance(node, ast.ImportFrom) and node.module is not None and node.level == 0 and _ours(node.module):
        for alias in node.names:
            submodule = f"{node.module}.{alias.name}"
            yield Import(submodule, (), at_load) if submodule in NAMES else Import(node.module, (alias.name,), at_load)
    for child in ast.iter_child_nodes(node):
        yield from _imports(child, at_load)


def _ours(name: str) -> bool:
    return name.split(".")[0] == "dcr_stream"


def _python_files(folder: Path) -> list[Path]:
    """Every Python file under a folder, linked folders included."""
    found = []
    for here, folders, files in os.walk(folder, followlinks=True):
        folders[:] = [name for name in folders if name != "__pycache__"]
        found += [Path(here, name) for name in files if name.endswith(".py")]
    return sorted(found)


def _module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {_module_name(path): path for path in _python_files(PACKAGE)}
NAMES = frozenset(FILES)
MODULES = tuple(Module(name, path) for name, path in FILES.items() if name != "dcr_stream")
BY_NAME = {module.name: module for module in MODULES}


def _assert_none(faults: Iterable[str]) -> None:
    found = list(faults)
    assert not found, "\n".join(["", *found])


def _python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)


# -- links ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("folder", LINKED)
def test_link_is_relative_and_resolves(folder: str) -> None:
    link = PACKAGE / folder
    assert link.readlink() == Path("..", folder)
    assert link.resolve() == ROOT / folder
    assert (link / "__init__.py").is_file()


@pytest.mark.parametrize("name", [*LINKED, "stages.chunk", "transports.base", "gate.modes"])
def test_importing_a_folder_without_the_package_fails(name: str) -> None:
    done = _python(f"import {name}")
    assert done.returncode == 1
    assert "ImportError: attempted relative import beyond top-level package" in done.stderr


# -- imports --------------------------------------------------------------------------------------------------------


def test_every_module_belongs_to_a_room_of_the_table() -> None:
    _assert_none(m.name for m in MODULES if m.room not in MAY_IMPORT)


def test_rooms_import_only_what_the_table_allows() -> None:
    _assert_none(
        f"{module.name} imports {imported.module}"
        for module in MODULES
        for imported in module.imports
        if _room(imported.module) not in MAY_IMPORT[module.room] | {module.room}
    )


def test_the_core_imports_no_implementations() -> None:
    for room in CORE:
        assert not MAY_IMPORT[room] & {*LINKED, "front", "cli", "integrations", "testing"}


def test_roles_take_time_network_and_threads_as_arguments() -> None:
    """Roles run unchanged on virtual time and an injected network."""
    forbidden = {"time", "datetime", "socket", "threading", "asyncio", "concurrent", "subprocess", "multiprocessing"}
    faults = []
    for module in MODULES:
        if module.room == "roles":
            for node in ast.walk(module.tree):
                names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
                names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                faults += [f"{module.name} imports {n}" for n in names if n.split(".")[0] in forbidden]
    _assert_none(faults)


def test_modules_take_only_public_names_from_each_other() -> None:
    _assert_none(
        f"{module.name} takes {name} from {imported.module}"
        for module in MODULES
        for imported in module.imports
        for name in imported.names
        if imported.module in BY_NAME and name not in (BY_NAME[imported.module].exported or ())
    )


def test_modules_import_each_other_absolutely() -> None:
    # The one parent-relative import of each linked folder is what makes importing the folder directly fail.
    relative = {
        module.name
        for module in MODULES
        for node in ast.walk(module.tree)
        if isinstance(node, ast.ImportFrom) and node.level
    }
    assert relative == {f"dcr_stream.{folder}" for folder in LINKED}


def test_no_module_imports_itself_in_a_circle() -> None:
    _assert_no_cycle({m.name: {i.module for i in m.imports if i.at_load} - {m.name} for m in MODULES})


def test_no_room_imports_itself_in_a_circle() -> None:
    graph: dict[str, set[str]] = {}
    for module in MODULES:
        rooms = {_room(imported.module) for imported in module.imports if imported.at_load}
        graph.setdefault(module.room, set()).update(rooms - {module.room})
    _assert_no_cycle(graph)


def _room(name: str) -> str:
    return BY_NAME[name].room if name in BY_NAME else "front"


def _assert_no_cycle(graph: Mapping[str, set[str]]) -> None:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


_REFUSING = """
import sys
tried = []
class Watch:
    def find_spec(self, name, path=None, target=None):
        if name in {forbidden!r}:
            tried.append(name)
        return None
sys.meta_path.insert(0, Watch())
{body}
assert not tried, f"tried to import {{tried}}"
"""


def test_importing_the_package_loads_no_framework() -> None:
    body = "import dcr_stream"
    forbidden = {"vllm", "megatron", "transformers", "torch", "numpy"}
    done = _python(_REFUSING.format(forbidden=forbidden, body=body))
    assert done.returncode == 0, done.stderr


def test_using_every_public_name_loads_no_optional_framework() -> None:
    body = "import dcr_stream\nfor name in dcr_stream.__all__: getattr(dcr_stream, name)"
    forbidden = {"vllm", "megatron", "transformers"}
    done = _python(_REFUSING.format(forbidden=forbidden, body=body))
    assert done.returncode == 0, done.stderr


# -- modules --------------------------------------------------------------------------------------------------------


def test_no_module_is_longer_than_it_should_be() -> None:
    lines = {module.name: len(module.text.splitlines()) for module in MODULES}
    _assert_none(f"{name}: {count} lines" for name, count in lines.items() if count > MAX_LINES)


def test_every_module_says_what_it_is() -> None:
    _assert_none(m.name for m in MODULES if not ast.get_docstring(m.tree))


def test_every_public_module_says_what_it_exports() -> None:
    # A package that holds nothing but its docstring has nothing to export.
    public = [m for m in MODULES if not m.name.rpartition(".")[2].startswith("_") and len(m.tree.body) > 1]
    _assert_none(m.name for m in public if m.exported is None)


# -- type checkers --------------------------------------------------------------------------------------------------


def _settings(tool: str) -> dict[str, list[str]]:
    with (ROOT / "pyproject.toml").open("rb") as file:
        settings: dict[str, list[str]] = tomllib.load(file)["tool"][tool]
    return settings


def test_mypy_sees_every_file() -> None:
    folders = _settings("mypy")["files"]
    sources = create_source_list([str(ROOT / folder) for folder in folders], Options())
    expected = {path for folder in ("dcr_stream", "tests", "bench") for path in _python_files(ROOT / folder)}
    assert {Path(source.path) for source in sources if source.path is not None} == expected


def test_pyright_excludes_no_source() -> None:
    settings = _settings("pyright")
    assert settings["include"] == ["."]
    hidden = {pattern.removeprefix("**/") for pattern in settings["exclude"]}
    sources = [
        path for folder in ("dcr_stream", "tests", "bench", "docs", *LINKED) for path in _python_files(ROOT / folder)
    ]
    _assert_none(str(path) for path in sources if hidden & {*path.relative_to(ROOT).parts})
