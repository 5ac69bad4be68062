"""Compiles for a TPU, without one, in a process of its own, and reads the machine code.

    python -m benchmarks.tpu.compile my_kernel.py --chip v6e --options '{"block": 512}'

prints the tree of loops of each Pallas kernel. The file defines `build(chip, **options) -> (function, arguments)`: a
function to jit, or jitted already, and its arguments' `jax.ShapeDtypeStruct`s. It is called under a mesh of that chip.

libtpu takes its dump options when it is loaded, and aborts the process where it meets a bug of its own: so a child
process compiles, and the parent only reads. One child compiles many cases in turn.
"""

import argparse
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.tpu.bundles import Kernel, read_kernels

ROOT = Path(__file__).resolve().parents[2]
LIBTPU = ROOT / ".libtpu" / "libtpu" / "libtpu.so"
DUMP_OPTIONS = "--xla_jf_dump_to={} --xla_jf_dump_llo_text=true --xla_jf_dump_llo_pass_label_regex=final.*"


@dataclass(frozen=True)
class Case:
    """One program to compile: `build(chip, **options)` of a Python file. Options are JSON."""

    file: str
    chip: str
    options: dict[str, Any] = field(default_factory=dict)
    function: str = "build"


@dataclass(frozen=True)
class Program:
    """What came of a case.

    Attributes:
      kernels: Pallas's, and XLA's fusions.
      compile_s: seconds from tracing to the program.
      around_cycles: XLA's estimate of everything but Pallas kernels, in cycles.
      error: the compiler's last word where there is no program.
    """

    case: Case
    kernels: list[Kernel] = field(default_factory=list)
    compile_s: float = 0.0
    around_cycles: int = 0
    error: str | None = None

    @property
    def pallas_kernels(self) -> list[Kernel]:
        return [kernel for kernel in self.kernels if kernel.is_pallas]


def compile_cases(cases: Sequence[Case]) -> list[Program]:
    """Compiles one after the other, and goes on with the next where one fails."""
    with tempfile.TemporaryDirectory(prefix="tpu_compile_") as folder:
        programs: list[Program] = []
        while len(programs) < len(cases):
            # A child that dies has failed in the first case without a result; the rest get a new child.
            programs += _compile_in_child(cases[len(programs) :], Path(folder) / str(len(programs)))
        return programs


def _compile_in_child(cases: Sequence[Case], folder: Path) -> list[Program]:
    folder.mkdir()
    (folder / "cases.json").write_text(
        json.dumps([{**asdict(case), "file": str(Path(case.file).absolute())} for case in cases])
    )
    (folder / "dump").mkdir()
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "LIBTPU_INIT_ARGS": " ".join(
            filter(None, [os.environ.get("LIBTPU_INIT_ARGS"), DUMP_OPTIONS.format(folder / "dump")])
        ),
    }
    command = [sys.executable, "-m", "benchmarks.tpu.compile", "--child", str(folder)]
    child = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    programs = []
    for i, case in enumerate(cases):
        result = folder / f"{i}.json"
        if not result.is_file():
            programs.append(Program(case, error=f"the compiler's process ended: {child.stderr[-2000:]}"))
            break
        found = json.loads(result.read_text())
        kernels = [] if found["error"] else read_kernels(folder / str(i))
        programs.append(Program(case, kernels, **found))
    return programs


def _child(folder: Path) -> None:
    import jax

    from jaxllm.pallas_kernels.tpu_target import tpu_mesh

    jax.config.update("jax_enable_compilation_cache", False)  # a program from there has no dump
    for i, case in enumerate(json.loads((folder / "cases.json").read_text())):
        start, around_cycles, error = time.perf_counter(), 0, None
        try:
            with jax.set_mesh(mesh := tpu_mesh(case["chip"], libtpu=_libtpu())):
                function, arguments = _load(case["file"], case["function"])(case["chip"], **case["options"])
                compiled = _jitted(function).lower(*_on(mesh, arguments)).compile()
            around_cycles = _estimated_cycles(compiled.as_text())
        except Exception as failure:  # Whatever the case raises is its result.
            error = f"{type(failure).__name__}: {failure}"
        (folder / str(i)).mkdir()
        for path in (folder / "dump").iterdir():
            path.rename(folder / str(i) / path.name)
        compile_s = time.perf_counter() - start
        result = {"compile_s": compile_s, "around_cycles": around_cycles, "error": error}
        (folder / f"{i}.json").write_text(json.dumps(result))


def _estimated_cycles(hlo: str) -> int:
    """XLA writes its estimate beside each operation of the program; a huge one means that it has none."""
    entry = hlo[hlo.index("\nENTRY ") :]
    return sum(n for n in map(int, re.findall(r'"estimated_cycles":"(\d+)"', entry)) if n < 1 << 62)


def _libtpu() -> Path | None:
    return LIBTPU if LIBTPU.is_file() else None


def _load(file: str, function: str) -> Any:
    spec = importlib.util.spec_from_file_location("case", file)
    if spec is None or spec.loader is None:
        raise FileNotFoundError(f"{file} is no Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, function)


def _jitted(function: Any) -> Any:
    import jax

    return function if hasattr(function, "lower") else jax.jit(function)


def _on(mesh: Any, arguments: Any) -> Any:
    """Arguments without a sharding get one: whole on the mesh's devices."""
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    whole = NamedSharding(mesh, PartitionSpec())
    return jax.tree.map(
        lambda a: a if a.sharding else jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=whole), arguments
    )


def describe(kernel: Kernel, num_opcodes: int = 0) -> str:
    """The tree of loops: bundles of their own, slots used and the part of the capacity, spills, DMAs."""
    lines = [f"{kernel.name}: {len(kernel.bundles):,} bundles, {kernel.vmem_bytes / 2**20:.2f} MiB of VMEM"]
    for loop in kernel.root.walk():
        indent = "  " * (loop.depth + 1)
        title = f"loop of depth {loop.depth}" if loop.depth else "outside of loops"
        code = loop.code
        lines.append(f"{indent}{title} at {loop.start:#x}: {code.num_bundles:,} bundles")
        indent += "  "
        used = [f"{u} {n:,} ({code.utilization[u]:.0%})" for u, n in code.slots.items() if n]
        lines += [indent + "slots: " + ", ".join(used[i : i + 6]) for i in range(0, len(used), 6)]
        stores, loads = code.num_scalar_spills
        lines.append(f"{indent}DMAs {code.num_dmas}; scalar spills {stores} stores, {loads} loads")
        if loop.regions:
            regions = ", ".join(f"{region.start:#x} +{region.stop - region.start:,}" for region in loop.regions)
            lines.append(f"{indent}counted whole, but can be skipped: {regions}")
        if num_opcodes:
            counts = [f"{opcode} {n:,}" for opcode, n in code.opcodes.most_common(num_opcodes)]
            lines += [indent + ", ".join(counts[i : i + 6]) for i in range(0, len(counts), 6)]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", help="Python file with build(chip, **options)")
    parser.add_argument("--chip", nargs="+", default=["v6e"], help="v5e, v5p, v6e, v7x (v6e)")
    parser.add_argument("--function", default="build", help="its name, if another")
    parser.add_argument("--options", type=json.loads, default={}, help="JSON object: keyword arguments of build")
    parser.add_argument("--opcodes", type=int, default=0, help="so many of each loop's most frequent instructions too")
    parser.add_argument("--all", action="store_true", help="also kernels that are not Pallas's")
    args = parser.parse_args()
    cases = [Case(args.file, chip, args.options, args.function) for chip in args.chip]
    for case, program in zip(cases, compile_cases(cases), strict=True):
        print(f"{case.chip}: {program.error or f'compiled in {program.compile_s:.1f} s'}")
        for kernel in program.kernels if args.all else program.pallas_kernels:
            print(describe(kernel, args.opcodes))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        _child(Path(sys.argv[2]))
    else:
        main()
