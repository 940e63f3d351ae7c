"""Wheel and sdist: what is in them, and that what they install works without the repository."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from importlib.metadata import distributions, packages_distributions
from pathlib import Path

import pytest

from dcr_stream import __version__

ROOT = Path(__file__).parents[1].resolve()
LINKED = ("stages", "transports", "gate")


def _run(*command: str | Path, cwd: Path) -> str:
    """Standard output of a command that must succeed."""
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _build(kind: str, source: Path, folder: Path) -> Path:
    """Build a ``wheel`` or ``sdist`` of ``source`` with the build tools of this environment."""
    _run(sys.executable, "-m", "build", "--no-isolation", f"--{kind}", "--outdir", folder, source, cwd=source)
    (made,) = folder.iterdir()
    return made


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _build("wheel", ROOT, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def unpacked_sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sdist")
    made = _build("sdist", ROOT, folder / "built")
    with tarfile.open(made) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    (unpacked,) = (folder / "unpacked").iterdir()
    return unpacked


def _contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def _package_files(root: Path) -> dict[str, bytes]:
    """Every file of the package below ``root``, linked folders included."""
    found = {}
    for here, _, files in os.walk(root / "dcr_stream", followlinks=True):
        for path in (Path(here, name) for name in files):
            if "__pycache__" not in path.parts:
                found[path.relative_to(root).as_posix()] = path.read_bytes()
    return found


def test_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    contents = _contents(wheel)
    assert {name.split("/")[0] for name in contents} == {"dcr_stream", f"dcr_stream-{__version__}.dist-info"}
    code = {name: content for name, content in contents.items() if name.startswith("dcr_stream/")}
    assert code == _package_files(ROOT)
    assert "dcr_stream/py.typed" in code
    assert all(f"dcr_stream/{folder}/__init__.py" in code for folder in LINKED)


def test_sdist_builds_the_same_wheel(wheel: Path, unpacked_sdist: Path, tmp_path: Path) -> None:
    assert _contents(_build("wheel", unpacked_sdist, tmp_path / "again")) == _contents(wheel)


def test_sdist_holds_real_files_in_the_linked_folders(unpacked_sdist: Path) -> None:
    for folder in LINKED:
        unpacked = unpacked_sdist / "dcr_stream" / folder
        assert unpacked.is_dir()
        assert not unpacked.is_symlink()
    assert _package_files(unpacked_sdist) == _package_files(ROOT)
    assert all((unpacked_sdist / name).is_file() for name in ("LICENSE", "README.md", "CHANGELOG.md", "Makefile"))


def test_wheel_works_in_an_environment_of_its_own(wheel: Path, tmp_path: Path) -> None:
    environment = tmp_path / "environment"
    venv.create(environment, with_pip=False)
    (python,) = environment.glob("*/python")
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-index", "--no-deps"]
    _run(*pip, wheel, cwd=tmp_path)
    # Dependencies come from this environment: they take too long to install. A path in a .pth file adds a folder's
    # modules but not the .pth files in it, so the editable install of this repository stays out of sight.
    site = Path(_run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=tmp_path).strip())
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"), encoding="utf-8")

    where = "import dcr_stream\nfor name in dcr_stream.__all__: getattr(dcr_stream, name)\nprint(dcr_stream.__file__)"
    assert Path(_run(python, "-c", where, cwd=tmp_path).strip()) == site / "dcr_stream" / "__init__.py"
    assert "demo" in _run(python.with_name("dcr-stream"), "--help", cwd=tmp_path)


def test_every_third_party_import_is_a_declared_dependency() -> None:
    declared = {name for group in _requirements().values() for name in group}
    providers = packages_distributions()
    missing = set()
    for path in map(Path, _package_files(ROOT)):
        # Conformance suites are for those who test, and have pytest.
        allowed = declared | ({"pytest", "hypothesis"} if path.parts[1] == "testing" else set())
        if path.suffix == ".py":
            for name in _imported(ROOT / path) - sys.stdlib_module_names - {"dcr_stream"}:
                if not {_canonical(provider) for provider in providers.get(name, [name])} & allowed:
                    missing.add(f"{path} imports {name}")
    assert not missing, "\n".join(["", *sorted(missing)])


@pytest.mark.skipif(os.environ.get("DCR_REQUIRE_FRAMEWORKS") != "1", reason="DCR_REQUIRE_FRAMEWORKS=1 insists on all")
def test_no_test_is_skipped_for_want_of_an_extra() -> None:
    installed = {_canonical(distribution.name) for distribution in distributions()}
    assert sorted({*_requirements()["demo"]} - installed) == []


def _requirements() -> dict[str, list[str]]:
    """Names of the distributions that the project needs (key ``""``) and of those of each extra."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]
    groups = {"": project["dependencies"], **project["optional-dependencies"]}
    return {
        key: [_canonical(re.split(r"[^A-Za-z0-9._-]", requirement)[0]) for requirement in group]
        for key, group in groups.items()
    }


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _imported(path: Path) -> set[str]:
    """Top-level names of every absolute import of a file."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None and node.level == 0:
            found.add(node.module.split(".")[0])
    return found
