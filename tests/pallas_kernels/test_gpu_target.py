"""Described GPUs, and what their compiler says of kernels, checked with those whose figures follow from their text."""

import importlib.util
from pathlib import Path

import pytest
from gpu_compilation import compile_in_child

from jaxllm.pallas_kernels.gpu_target import CARDS, KernelFigures, Loop, find_loops, gpu_mesh

KIB = 1024
H200, H100 = ["gpu", "NVIDIA H200", "9.0"], ["gpu", "NVIDIA H100 80GB HBM3", "9.0"]
# Of a [64, 64] @ [64, N] product in bfloat16: both operands and the result, and the barrier's 8 bytes.
MATRICES_BYTES = {"product_64": 24 * KIB + 8, "product_128": 40 * KIB + 8, "product_192": 56 * KIB + 8}


def test_each_kernel_is_described_once_however_often_its_process_has_compiled_it():
    script = Path(__file__).with_name("gpu_target_programs.py")
    programs = compile_in_child(script, [("h200", 128), ("h200", 192), ("h100", 128)])
    assert [(device, [figures["name"] for figures, _ in kernels]) for device, kernels in programs] == [
        (H200, ["product_128", "product_64"]),
        (H200, ["product_64"]),
        (H200, ["product_192", "product_64"]),
        (H200, ["product_64"]),
        (H100, ["product_128", "product_64"]),
        (H100, ["product_64"]),
    ]
    for figures, num_blocks in [kernel for _, kernels in programs for kernel in kernels]:
        kernel = KernelFigures(**figures)
        assert (kernel.threads, kernel.num_wgmma) == (128, 4)  # One warpgroup; K = 64 in steps of 16.
        assert (kernel.spill_bytes, kernel.stack_bytes) == (0, 0)
        assert 32 <= kernel.registers < 168  # At least what holds the smallest accumulator.
        assert kernel.dynamic_shared_bytes == MATRICES_BYTES[kernel.name]
        assert num_blocks == {"product_64": 8, "product_128": 5, "product_192": 3}[kernel.name]


SASS = """
.L_x_0:
   -:-:1:Y:02        /*0000*/                   MOV R1, c[0x0][0x28] ;
.L_x_1:
   -:-:-:Y:01        /*0010*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R2 ;
   1:-:-:Y:05        /*0020*/              @!P0 BRA `(.L_x_1) ;
   -:-:-:Y:01        /*0030*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR24], RZ, !UPT ;
   -:-:-:Y:01        /*0040*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR24], R24 ;
   -:-:-:Y:05        /*0050*/             @!UP0 BRA `(.L_x_1) ;
   -:-:-:Y:01        /*0060*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR24], R24 ;
.L_x_2:
   -:-:-:Y:01        /*0070*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR24], R24 ;
   -:-:-:Y:05        /*0080*/               @P1 BRA `(.L_x_2) ;
   -:-:-:Y:05        /*0090*/               @P2 BRA `(.L_x_0) ;
   -:-:-:Y:05        /*00a0*/                   EXIT ;
"""


def test_loops_are_the_innermost_ones_with_products():
    assert find_loops(SASS) == (Loop(5, 2), Loop(2, 1))


@pytest.mark.parametrize(
    ("change", "blocks"),
    [
        ({}, 16),  # 2,048 threads
        ({"threads": 32, "registers": 16}, 32),
        ({"registers": 168}, 3),  # 168 x 128 x 3 = 64,512 of 65,536
        ({"registers": 129}, 3),  # A warp's registers come in units of 256: 136 of each thread.
        ({"threads": 384, "registers": 168}, 1),
        ({"threads": 96, "registers": 128}, 4),  # Three warps take the registers of four.
        ({"dynamic_shared_bytes": 113 * KIB}, 2),  # 228 KiB, with 1 KiB of each block for CUDA
        ({"dynamic_shared_bytes": 113 * KIB + 1}, 1),
        ({"dynamic_shared_bytes": 227 * KIB}, 1),
        ({"dynamic_shared_bytes": 227 * KIB + 1}, 0),
    ],
)
def test_blocks_of_an_sm_are_limited_by_what_runs_out_first(change, blocks):
    figures = {"threads": 128, "registers": 32, "dynamic_shared_bytes": 0} | change
    kernel = KernelFigures(name="any", stack_bytes=0, spill_bytes=0, static_shared_bytes=0, num_wgmma=0, **figures)
    assert kernel.blocks_per_sm(CARDS["h100"]) == blocks


def test_an_unknown_card_is_named():
    with pytest.raises(ValueError, match="card is 'b200'; choose one of h200, h100"):
        gpu_mesh("b200")


@pytest.mark.skipif(importlib.util.find_spec("jax_plugins") is not None, reason="this environment has a plugin of JAX")
def test_a_process_without_the_plugin_is_told_how_to_get_it():
    with pytest.raises(FileNotFoundError, match=r"CUDA plugin was not found: install it .* `make cuda`"):
        gpu_mesh("h200")
