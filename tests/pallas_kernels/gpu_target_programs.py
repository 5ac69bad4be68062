"""A script for `compile_in_child`: programs whose kernels are known, compiled for each card. See test_gpu_target."""

import dataclasses
import json
import sys

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import NamedSharding, PartitionSpec

from jaxllm.pallas_kernels.gpu_target import CARDS, compile_with_figures, gpu_mesh

DTYPE = jnp.bfloat16


def product(a: Array, b: Array) -> Array:
    """[64, 64] @ [64, N] in a block of one warpgroup: four `wgmma`, and all three matrices in shared memory."""

    def body(a_gmem, b_gmem, out_gmem, a_smem, b_smem, out_smem, barrier):
        for source, target in ((a_gmem, a_smem), (b_gmem, b_smem)):
            plgpu.copy_gmem_to_smem(source, target, barrier)
            plgpu.barrier_wait(barrier)

        def multiply(accumulator):
            plgpu.wgmma(accumulator, a_smem, b_smem)
            return accumulator[...]

        out_smem[...] = pl.run_scoped(multiply, plgpu.ACC(out_gmem.shape)).astype(DTYPE)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out_smem, out_gmem)
        plgpu.wait_smem_to_gmem(0)

    def tile(*shape: int) -> plgpu.SMEM:
        return plgpu.SMEM(shape, DTYPE, transforms=(plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)))

    N = b.shape[1]
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((64, N), DTYPE),
        scratch_types=[tile(64, 64), tile(64, N), tile(64, N), plgpu.Barrier()],
        kernel_name=f"product_{N}",
    )(a, b)


def two_widths(a: Array, b: Array, c: Array) -> tuple[Array, ...]:
    return product(a, b), product(a, c)


def one_of_them_twice(a: Array, b: Array, c: Array) -> tuple[Array, ...]:
    return product(a, b), product(b, a), a @ b


def main() -> None:
    found = []
    for card, N in json.loads(sys.argv[1]):
        mesh = gpu_mesh(card)
        device = mesh.devices.flat[0]
        kinds = device.platform, device.device_kind, device.compute_capability
        whole = NamedSharding(mesh, PartitionSpec())
        shapes = [jax.ShapeDtypeStruct(shape, DTYPE, sharding=whole) for shape in ((64, 64), (64, 64), (64, N))]
        for program in (two_widths, one_of_them_twice):
            with jax.set_mesh(mesh):
                _, figures = compile_with_figures(jax.jit(program).lower(*shapes))
            found.append((kinds, [(dataclasses.asdict(f), f.blocks_per_sm(CARDS[card])) for f in figures]))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
