"""The wheel contains every module and data file of the packages, and nothing else."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
PACKAGE_FOLDERS = ("plugins", "builders", "runtime", "scripts", "integrations")
DATA_SUFFIXES = (".cu", ".cuh", ".html", ".json", ".txt")


def expected_files() -> set[str]:
    """Wheel paths of every Python module and data file below the package folders."""
    found = set()
    for folder in PACKAGE_FOLDERS:
        for path in (ROOT / folder).rglob("*"):
            if "__pycache__" in path.parts or path.suffix not in (".py", *DATA_SUFFIXES):
                continue
            found.add(f"replayssm/{path.relative_to(ROOT).as_posix()}")
    return found


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Built from a copy: a build in the project would leave files there that later builds pick up."""
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for folder in PACKAGE_FOLDERS:
        if (ROOT / folder).is_dir():
            shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__"))
    target = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--wheel-dir", str(target), str(source)], check=True, capture_output=True, text=True)
    (path,) = target.glob("*.whl")
    return zipfile.ZipFile(path)


def test_wheel_contains_exactly_the_package_folders(wheel: zipfile.ZipFile) -> None:
    packaged = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert packaged == expected_files()


def test_every_package_is_listed() -> None:
    """Editable installs see unlisted subpackages, wheels do not: name the missing one."""
    listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    folders = {
        "replayssm." + path.parent.relative_to(ROOT).as_posix().replace("/", ".")
        for folder in PACKAGE_FOLDERS
        for path in (ROOT / folder).rglob("__init__.py")
    }
    assert listed == folders


def test_module_for_tensorrt_llm_is_found_where_the_wheel_is_installed(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    """`pip install --no-deps`: beside packages that are there, but without the editable installation (-S)."""
    wheel.extractall(tmp_path)
    standin = ROOT / "tests" / "integrations" / "standin"
    path = os.pathsep.join(map(str, (tmp_path, sysconfig.get_paths()["purelib"], standin)))
    code = "from replayssm.scripts.cli import main; main()"
    found, checked = (
        subprocess.run(
            [sys.executable, "-S", "-c", code, "trtllm-module", *arguments],
            env=os.environ | {"PYTHONPATH": path},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for arguments in ((), ("--check",))
    )
    assert Path(found.strip()) == tmp_path / "replayssm" / "integrations" / "replayssm_trtllm"
    assert checked.startswith("replay is registered for NemotronHForCausalLM")


def test_console_command_is_declared(wheel: zipfile.ZipFile) -> None:
    (entry_points,) = [name for name in wheel.namelist() if name.endswith("entry_points.txt")]
    assert "replayssm = replayssm.scripts.cli:main" in wheel.read(entry_points).decode()


def test_folders_are_not_imported_as_top_level_packages() -> None:
    """`import plugins` from the project's root would create a second copy of every module."""
    code = (
        "import sys; import replayssm.plugins.contract, replayssm.scripts.cli; "
        "sys.exit(any(name in sys.modules for name in ('plugins', 'builders', 'runtime', 'scripts')))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_imports_point_one_way() -> None:
    """scripts -> {runtime, builders} -> plugins; runtime and builders do not know each other."""
    allowed = {
        "plugins": {"plugins"},
        "builders": {"plugins", "builders"},
        "runtime": {"plugins", "runtime"},
        "integrations": {"plugins", "runtime", "integrations"},
        "scripts": {"plugins", "builders", "runtime", "scripts"},
    }
    offenders = []
    for folder, targets in allowed.items():
        for path in (ROOT / folder).rglob("*.py"):
            for line in path.read_text().splitlines():
                words = line.split()
                if len(words) > 1 and words[0] in ("from", "import") and words[1].startswith("replayssm."):
                    target = words[1].split(".")[1]
                    if target not in targets:
                        offenders.append(f"{path.relative_to(ROOT)}: {line.strip()}")
    assert not offenders
