"""What the static measure says of a kernel is checked against kernels whose loops and bytes are known."""

import re
from dataclasses import fields, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from benchmarks.kernel_workload import Workload
from benchmarks.tpu import jax_kernel as tpu_jax_kernel
from benchmarks.tpu import our_kernel as tpu_our_kernel
from benchmarks.tpu.bundles import Region, read_kernels
from benchmarks.tpu.chips import CHIPS, Chip
from benchmarks.tpu.compile import LIBTPU, Case, Program, compile_cases, describe
from benchmarks.tpu.estimate import estimate
from benchmarks.tpu.interpret import Trips, count, count_each
from jaxllm.pallas_kernels.ragged_paged_attention.tpu_blocks import Blocks
from jaxllm.pallas_kernels.tpu_target import tpu_mesh

BLOCK = 128
# A program that a dump describes: outside, a loop, in it a loop and a region that a branch can skip. The inner loop's
# branch bears the outer one's nesting, in front of a delay slot that is filled from the inner loop.
BUNDLES = """
hlo: sample.1
= control target key start
LB: loop body
= control target key end

     0   :  { %s1_s0 = smov.u32 [#allocation2]  ;;  %s2_s1 = inlined_call_operand.hbm [shape: s32[8]] /* a comment
hlo: sample.1
 */ } /* Start region 1 */
   0x1 LB: > { %s3_s0 = sadd.s32 1, %s1_s0 }
   0x2 LB: >> { %v4_v0 = vld [vmem:[#allocation2]]  ;;  %v5_v1 = vadd.f32 %v4_v0, %v4_v0 } /* Start region 5 */
   0x3   : >> { %6 = vst [vmem:[#allocation9_spill]] %v5_v1  ;;  %7 = sst [smem:[#allocation8_spill]] %s3_s0 }
   0x4   : > { %8 = sbr.rel (!%p1_p0) target = $region5 }
   0x5   : >> { %v9_v2 = vld [vmem:[#allocation9_spill]] }
   0x6   :  {} /* End region 5 */
   0x7   : > { %10 = sbr.rel (%p2_p1) target = $region8 }
   0x8   :  {} /* Start region 7 */
   0x9   : > { %11 = dma.hbm_to_vmem [thread:$0]  /*hbm=*/%s2_s1, /*size_in_granules=*/16 } /* End region 7 */
   0xa PF: > { %12 = sbr.rel (!%p3_p2) target = $region1 }
   0xb   :  {} /* End region 1 */
   0xc   :  { %13 = vsyncpa [#allocation3], 1 }
"""
USED = [[0, 0, 1], [0, 0, 1], [1, 0, 0], [0, 1, 1], [0, 0, 1], [1, 0, 0], *[[0, 0, 0]] * 7]


@pytest.fixture
def dump(tmp_path: Path) -> Path:
    rows = "\n".join(" ".join(map(str, row)) for row in USED)
    files = {
        "00-pre-finalize-registers-and-allocations": "  #allocation2 [shape = 'f32[8,128]', space=vmem, size = 0x1000]",
        "01-final_hlo-static-per-bundle-utilization": (
            f"== CAPACTIY:\nMATMUL, VSTORE:SPILL, SALU\n 2 1 2\n== UTILIZATION:\n{rows}\n"
        ),
        "02-schedule-analysis_final_bundles": 'custom_call_target="tpu_custom_call"',
        "03-final_bundles": BUNDLES,
    }
    for name, text in files.items():
        (tmp_path / f"17-sample.1-{name}.txt").write_text(text)
    return tmp_path


def test_every_bundle_belongs_to_one_loop(dump: Path):
    (kernel,) = read_kernels(dump)
    outer = kernel.root.loops[0]
    (inner,) = outer.loops
    assert (kernel.name, kernel.is_pallas, kernel.vmem_bytes) == ("sample.1", True, 4096)
    assert kernel.root.code.own.tolist() == [0, 12]
    assert outer.code.own.tolist() == [1, 7, 8, 9, 10, 11]
    assert inner.code.own.tolist() == [2, 3, 4, 5, 6]


def test_slots_instructions_and_spills_are_those_of_the_loops_own_bundles(dump: Path):
    (kernel,) = read_kernels(dump)
    outer, inner = kernel.root.loops[0].code, kernel.root.loops[0].loops[0].code
    assert inner.slots == {"MATMUL": 2, "VSTORE:SPILL": 1, "SALU": 2}
    assert inner.utilization == {"MATMUL": 2 / 10, "VSTORE:SPILL": 1 / 5, "SALU": 2 / 10}
    assert inner.opcodes == {"vld": 2, "vadd.f32": 1, "vst": 1, "sst": 1, "sbr.rel": 1}
    assert inner.num_scalar_spills == (1, 0)
    assert (outer.num_dmas, inner.num_dmas, kernel.root.code.num_dmas) == (1, 0, 0)


def test_regions_that_a_branch_can_skip_are_found_and_loops_are_none(dump: Path):
    (kernel,) = read_kernels(dump)
    outer = kernel.root.loops[0]
    assert outer.regions == kernel.regions == [Region(8, 10)]
    assert not outer.alternatives  # No product in it.


def test_a_dump_whose_files_disagree_is_refused(dump: Path):
    path = next(dump.glob("*utilization.txt"))
    path.write_text(path.read_text() + "0 0 0\n")
    with pytest.raises(ValueError, match="13 bundles, utilization of 14"):
        read_kernels(dump)


def build(chip: str, num_blocks: int = 4000) -> tuple:
    """Adds up the squares of square blocks, fetched one by one, some times over, the first of them twofold.

    So it has two dynamic loops, and in the inner one two branches. Of fewer blocks, XLA could put all into VMEM, and
    there would be no DMA.
    """
    del chip

    def kernel(rounds, x_hbm, out, buffer, sem):
        out[...] = jnp.zeros_like(out)

        @pl.loop(0, rounds[0])
        def _(_):
            @pl.loop(0, rounds[1])
            def _(block):
                copy = pltpu.make_async_copy(x_hbm.at[block], buffer, sem)
                copy.start()
                copy.wait()

                @pl.when(block == 0)
                def _():
                    out[...] += jnp.dot(buffer[...] * 2, buffer[...], preferred_element_type=jnp.float32)

                @pl.when(block != 0)
                def _():
                    out[...] += jnp.dot(buffer[...], buffer[...], preferred_element_type=jnp.float32)

    def call(*arrays: jax.Array) -> jax.Array:
        return pl.pallas_call(
            kernel,
            out_shape=jax.ShapeDtypeStruct((BLOCK, BLOCK), jnp.float32),
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=1,
                grid=(1,),
                in_specs=[pl.BlockSpec(memory_space=pltpu.HBM)],
                out_specs=pl.BlockSpec(memory_space=pltpu.VMEM),
                scratch_shapes=[pltpu.VMEM((BLOCK, BLOCK), jnp.bfloat16), pltpu.SemaphoreType.DMA],
            ),
        )(*arrays)

    return call, (
        jax.ShapeDtypeStruct((2,), jnp.int32),
        jax.ShapeDtypeStruct((num_blocks, BLOCK, BLOCK), jnp.bfloat16),
    )


def fail(chip: str) -> tuple:
    raise ValueError(f"no kernel for {chip}")


@pytest.fixture(scope="module")
def programs() -> list[Program]:
    # The failure in the middle must not keep the last from being compiled.
    return compile_cases([Case(__file__, "v6e"), Case(__file__, "v6e", function="fail"), Case(__file__, "v7x")])


def test_compiled_loops_are_those_of_the_code(programs: list[Program]):
    for program in (programs[0], programs[2]):
        assert program.error is None
        (kernel,) = program.pallas_kernels
        (outer,) = kernel.root.loops
        (inner,) = outer.loops
        assert not inner.loops
        assert sum(loop.code.num_bundles for loop in kernel.root.walk()) == len(kernel.bundles)
        assert inner.code.slots["MATMUL"]
        assert not outer.code.slots["MATMUL"]
        first, others = inner.alternatives
        assert first.own.max() < others.own.min()
        assert not inner.code.without([first, others]).slots["MATMUL"]
        assert inner.code.num_dmas == 1
        assert CHIPS["v6e"].matrix_cycles(inner.code.opcodes) > 0
        assert f"loop of depth 2 at {inner.start:#x}: {inner.code.num_bundles:,} bundles" in describe(kernel)


def test_one_case_that_fails_leaves_the_others(programs: list[Program]):
    assert programs[1].error == "ValueError: no kernel for v6e"
    assert not programs[1].kernels


def test_trips_and_bytes_are_those_of_the_run():
    call, (_, x) = build("v6e", num_blocks=5)
    counts = count(call, jnp.array([2, 5], jnp.int32), jnp.zeros(x.shape, x.dtype))
    assert counts.root == Trips(1, [Trips(2, [Trips(10, alternatives=[2, 8])])])
    assert counts.dma_bytes == {("hbm", "vmem"): 10 * 2 * BLOCK * BLOCK}
    assert counts.num_dmas == {("hbm", "vmem"): 10}
    assert counts.hbm_bytes == 10 * 2 * BLOCK * BLOCK


class Module:
    """A kernel's module, as `tpu_static.KERNELS` has them: two rounds over blocks, where one would do."""

    NAME = "sample"

    @staticmethod
    def least_bytes(workload: Workload) -> int:
        return 5 * 2 * BLOCK * BLOCK

    @staticmethod
    def num_fetches(workload: Workload, blocks: dict[str, int]) -> int:
        return 10

    @staticmethod
    def num_cores(chip: Chip, workload: Workload) -> int:
        return chip.cores

    @staticmethod
    def matrix_roof(chip: Chip, workload: Workload) -> float:
        return 0.75


WORKLOAD = Workload(
    num_seqs=2, q_len=4, kv_len=10, num_heads=4, num_kv_heads=2, head_dim=128, kv_dtype="bfloat16", page_size=16
)


def test_the_estimate_adds_up_loops_and_bytes(programs: list[Program]):
    call, (_, x) = build("v6e", num_blocks=5)
    counts = count(call, jnp.array([2, 5], jnp.int32), jnp.zeros(x.shape, x.dtype))
    found = estimate("v6e", Module, programs[0], WORKLOAD, {}, counts)  # type: ignore[arg-type]
    assert [part.trips for part in found.parts] == [1, 2, 10, 2, 8]
    assert sum(part.code.num_bundles for part in found.parts) == len(programs[0].pallas_kernels[0].bundles)
    assert all(part.cycles == part.code.num_bundles for part in found.parts)
    assert found.cycles == sum(part.trips * part.code.num_bundles for part in found.parts)
    assert found.product_cycles == sum(part.total for part in found.parts[3:])
    assert found.inner is max(found.parts, key=lambda part: part.total)
    assert found.compute_s == found.cycles / 1.75e9
    assert found.memory_s == 2 * found.memory_bound_s
    assert found.time_s == pytest.approx(found.compute_s + found.memory_s / 10)


def test_trips_of_other_loops_are_refused(programs: list[Program]):
    call, (_, x) = build("v6e", num_blocks=5)
    counts = count(call, jnp.array([2, 5], jnp.int32), jnp.zeros(x.shape, x.dtype))
    counts.root.loops[0].loops.append(Trips(1))
    with pytest.raises(ValueError, match=re.escape("has the loops [[[]]], the kernel's code [[[][]]]")):
        estimate("v6e", Module, programs[0], WORKLOAD, {}, counts)  # type: ignore[arg-type]


def test_the_least_work_of_a_step():
    assert WORKLOAD.token_kv_bytes == 2 * 2 * 128 * 2
    assert WORKLOAD.kv_bytes == 2 * 10 * 1024
    # 12 old tokens in; 8 tokens of query, key and value in, and of output, key and value out.
    assert WORKLOAD.least_bytes == 12 * 1024 + 8 * (1024 + 1024) + 8 * (1024 + 1024)
    assert WORKLOAD.flops == 4 * 2 * (7 + 8 + 9 + 10) * 4 * 128


@pytest.mark.parametrize("name", CHIPS)
def test_figures_of_chips_are_those_that_pallas_has(name: str):
    with jax.set_mesh(tpu_mesh(name, libtpu=LIBTPU)):
        info = pltpu.get_tpu_info()
    chip = CHIPS[name]
    assert (chip.vmem_bytes, chip.num_mxus, chip.mxu_size) == (
        info.vmem_capacity_bytes,
        info.num_mxus,
        info.mxu_column_size,
    )
    assert chip.flops_per_s == pytest.approx(info.bf16_ops_per_second, rel=0.01)
    # Pallas has 2.46 TB/s for v5p, where Google's page has 2.765.
    assert chip.bytes_per_s == pytest.approx(info.mem_bw_bytes_per_second, rel=0.13 if name == "v5p" else 0.01)
    vmatmul_flops = 2 * 16 * chip.mxu_size**2
    peak = chip.num_mxus * vmatmul_flops / (16 / chip.rows_per_cycle) * chip.clock_hz
    assert peak == pytest.approx(chip.flops_per_s, rel=0.15 if name == "v7x" else 0.01)


@pytest.mark.parametrize(
    ("chip", "head_dim", "ours", "jax_s"),
    [
        ("v6e", 128, 2 / 3, 1 / 2),  # Scores fill half of the unit; ours has values whole.
        ("v6e", 256, 1, 1),
        ("v6e", 64, 1 / 3, 1 / 4),  # Half of that for the other head of the tile.
        ("v5e", 128, 1, 1),
        ("v5e", 64, 1 / 2, 1 / 2),
    ],
)
def test_heads_smaller_than_the_matrix_unit_lower_the_roof(chip: str, head_dim: int, ours: float, jax_s: float):
    workload = replace(WORKLOAD, head_dim=head_dim)
    assert tpu_our_kernel.matrix_roof(CHIPS[chip], workload) == pytest.approx(ours)
    assert tpu_jax_kernel.matrix_roof(CHIPS[chip], workload) == jax_s


def test_two_cores_share_rows_and_memory(programs: list[Program]):
    call, (_, x) = build("v6e", num_blocks=5)
    counts = count(call, jnp.array([2, 5], jnp.int32), jnp.zeros(x.shape, x.dtype))
    one, two, alone = (
        estimate(chip, Module, programs[0], workload, {}, counts)  # type: ignore[arg-type]
        for chip, workload in (("v6e", WORKLOAD), ("v5p", WORKLOAD), ("v5p", replace(WORKLOAD, num_seqs=1)))
    )
    assert (one.num_cores, two.num_cores) == (1, 2)
    assert two.compute_s == pytest.approx(two.cycles / 1.75e9 / 2)
    assert alone.compute_s == pytest.approx(alone.cycles / 1.75e9)
    assert two.memory_s == pytest.approx(counts.hbm_bytes / 2765e9)


def test_the_matrix_units_are_busy_for_a_part_of_the_cycles(programs: list[Program]):
    call, (_, x) = build("v6e", num_blocks=5)
    counts = count(call, jnp.array([2, 5], jnp.int32), jnp.zeros(x.shape, x.dtype))
    found = estimate("v6e", Module, programs[0], WORKLOAD, {}, counts)  # type: ignore[arg-type]
    cycles = BLOCK**3 / (2 * 2 * 256**2) / CHIPS["v6e"].filled(BLOCK)  # Two units take two rows each.
    assert found.matrix_busy == pytest.approx(10 * cycles / found.cycles)
    assert found.matrix_roof == 0.75


def test_several_calls_are_counted_apart():
    call, (_, x) = build("v6e", num_blocks=5)
    x = jnp.zeros(x.shape, x.dtype)
    calls = [[jnp.array(rounds, jnp.int32), x] for rounds in ([2, 5], [1, 3])]
    found = count_each(call, calls)
    assert found == [count(call, *arguments) for arguments in calls]
    assert found[1].root == Trips(1, [Trips(1, [Trips(3, alternatives=[1, 2])])])
    assert found[1].num_dmas == {("hbm", "vmem"): 3}


@pytest.mark.nightly
def test_workloads_counted_together_are_as_alone():
    heads = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 128, "kv_dtype": "bfloat16", "page_size": 64}
    blocks = {field.name: 128 for field in fields(Blocks)}
    workloads = [Workload(num_seqs=s, q_len=q, kv_len=q, **heads) for s, q in ((1, 256), (2, 128))]
    together = tpu_our_kernel.counts_each(workloads, blocks)
    assert together == [tpu_our_kernel.counts(workload, blocks) for workload in workloads]
