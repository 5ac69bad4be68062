"""The wheel: what it holds, and that it works where there is no checkout."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parent.parent
SOURCES = {
    "jaxllm": "jaxllm",
    "scheduler": "jaxllm/scheduler",
    "pallas_kernels": "jaxllm/pallas_kernels",
    "server": "jaxllm/server",
}
MODULES = (
    "jaxllm",
    "jaxllm.scheduler",
    "jaxllm.pallas_kernels",
    "jaxllm.server",
    "jaxllm.llm",
    "jaxllm.server.commands.cli",
)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(CHECKOUT)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    [path] = folder.glob("*.whl")
    return path


def test_it_holds_each_module_once_and_no_links_nor_tests(wheel):
    with zipfile.ZipFile(wheel) as archive:
        entries = archive.infolist()
    names = [entry.filename for entry in entries]
    assert len(names) == len(set(names))
    assert not [entry.filename for entry in entries if (entry.external_attr >> 16) & 0o170000 == 0o120000]
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"jaxllm"}
    assert not [name for name in names if "test" in name or "__pycache__" in name]

    expected = set()
    for source, home in SOURCES.items():
        for path in (CHECKOUT / source).rglob("*.py"):
            expected.add(f"{home}/{path.relative_to(CHECKOUT / source)}")
    assert {name for name in names if name.endswith(".py")} == expected


def test_it_holds_the_license_and_the_command(wheel):
    with zipfile.ZipFile(wheel) as archive:
        files = {name.rpartition("/")[2]: name for name in archive.namelist()}
        assert b"Apache License" in archive.read(files["LICENSE"])
        assert b"jaxllm = jaxllm.server.commands.cli:main" in archive.read(files["entry_points.txt"])


def test_it_works_outside_the_checkout(wheel, tmp_path):
    target, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    elsewhere.mkdir()
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(target), str(wheel)]
    subprocess.run(install, check=True, capture_output=True)
    # Python puts PYTHONPATH before its own site-packages, where the checkout may be installed.
    program = f"import importlib\nfor name in {MODULES}: print(importlib.import_module(name).__file__)"
    result = subprocess.run(
        [sys.executable, "-c", program],
        cwd=elsewhere,
        env=os.environ | {"PYTHONPATH": str(target)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    files = [Path(line) for line in result.stdout.split()]
    assert len(files) == len(MODULES)
    assert all(file.is_relative_to(target) for file in files)
