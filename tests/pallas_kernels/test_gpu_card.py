"""Which GPUs get the kernels for Hopper, and what is said where they do not run."""

import functools
import logging
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AbstractDevice, AbstractMesh

from jaxllm.pallas_kernels.ragged_paged_attention import (
    KVCacheSpec,
    check_support,
    default_implementation,
    gpu_card,
    kv_cache_shape,
    ragged_paged_attention,
)

HOPPERS = ["NVIDIA H100 80GB HBM3", "NVIDIA H100 PCIe", "NVIDIA H200", "NVIDIA H20-3e", "NVIDIA GH200 480GB"]
OTHERS = {
    "Tesla T4": "7.5",
    "NVIDIA L4": "8.9",
    "NVIDIA A100-SXM4-80GB": "8.0",
    "NVIDIA B200": "10.0",
    "NVIDIA RTX PRO 6000 Blackwell Server Edition": "12.0",
}
SPEC = KVCacheSpec(num_pages=8, page_size=64, num_kv_heads=2, head_dim=128, dtype=jnp.dtype("bfloat16"))


@pytest.fixture(autouse=True)
def _forget_what_was_said():
    gpu_card.say_that_xla_runs.cache_clear()


@pytest.fixture
def machine(monkeypatch):
    """Makes a GPU the machine's own."""

    def become(name: str, capability: str, **others: int) -> None:
        device = SimpleNamespace(platform="gpu", device_kind=name, compute_capability=capability, **others)
        monkeypatch.setattr(jax, "devices", lambda: [device])
        monkeypatch.setattr(jax, "default_backend", lambda: "gpu")

    return become


def described(name: str, platform: str = "gpu"):
    """As a mesh of such devices that is set."""
    return jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=AbstractDevice(name, None, platform)))


def supported(spec: KVCacheSpec = SPEC, implementation: str | None = None, q_dtype: str = "bfloat16") -> str:
    return check_support(
        spec,
        num_heads=8,
        q_dtype=jnp.dtype(q_dtype),
        max_seqs=4,
        max_pages_per_seq=16,
        implementation=implementation,
    )


@pytest.mark.parametrize("name", HOPPERS)
def test_a_hopper_takes_the_kernels(name, machine, caplog):
    with described(name):
        assert default_implementation() == supported() == supported(implementation="gpu") == "gpu"
    machine(name, "9.0")
    assert default_implementation() == supported() == supported(implementation="gpu") == "gpu"
    machine("NVIDIA whatever comes next", "9.0")
    assert default_implementation() == "gpu"
    assert not caplog.records


@pytest.mark.parametrize(("name", "capability"), OTHERS.items())
def test_another_gpu_takes_xla_and_says_so_once(name, capability, machine, caplog):
    machine(name, capability)
    for _ in range(3):
        assert default_implementation() == supported() == "xla"
    (line,) = caplog.messages
    assert "left to XLA" in line
    assert f"this is {name} (compute capability {capability})" in line
    with described(name):
        assert default_implementation() == "xla"


@pytest.mark.parametrize(("name", "capability"), OTHERS.items())
def test_the_kernels_asked_for_on_another_gpu_are_refused(name, capability, machine):
    machine(name, capability)
    with pytest.raises(ValueError, match=rf"needs a GPU of NVIDIA's Hopper .*9\.0.*this is {name} \(.*{capability}\)"):
        supported(implementation="gpu")
    with described("AMD Instinct MI300X"), pytest.raises(ValueError, match="this is AMD Instinct MI300X: take 'xla'"):
        supported(implementation="gpu")


def test_a_cpu_takes_xla_without_a_word_and_the_kernels_where_pallas_interprets(caplog):
    assert default_implementation() == "xla"
    with pytest.raises(ValueError, match=r"needs a GPU of NVIDIA's Hopper .* this is cpu"):
        supported(implementation="gpu")
    with plgpu.force_gpu_interpret_mode():
        assert supported(implementation="gpu") == "gpu"
        assert default_implementation() == "xla"
    assert not caplog.records


def test_the_mesh_goes_before_the_machine(machine):
    machine("NVIDIA H200", "9.0")
    with described("Tesla T4"):
        assert default_implementation() == "xla"
    with described("TPU v6 lite", "tpu"):
        assert default_implementation() == "tpu"


def test_multiprocessors_are_those_of_the_card_that_is_there_if_it_is_the_one_described(machine):
    assert gpu_card.num_sms() == gpu_card.NUM_SMS
    machine("NVIDIA H100 PCIe", "9.0", core_count=114)
    assert gpu_card.num_sms() == 114
    with described("NVIDIA H100 PCIe"):
        assert gpu_card.num_sms() == 114
    with described("NVIDIA H200"):
        assert gpu_card.num_sms() == gpu_card.NUM_SMS


@pytest.mark.parametrize(
    ("change", "q_dtype", "reason"),
    [
        ({"dtype": jnp.dtype("float32")}, "float32", "q is float32"),
        ({"head_dim": 96}, "bfloat16", "head size is 96"),
        ({"page_size": 8}, "bfloat16", "page_size is 8"),
    ],
)
def test_what_the_kernels_cannot_do_is_left_to_xla_unless_they_are_asked_for(change, q_dtype, reason, caplog):
    spec = KVCacheSpec(**(vars(SPEC) | change))
    with described("NVIDIA H100 80GB HBM3"):
        assert default_implementation() == "gpu"
        assert supported(spec, q_dtype=q_dtype) == supported(spec, q_dtype=q_dtype) == "xla"
        (line,) = caplog.messages
        assert "left to XLA" in line
        assert reason in line
        with pytest.raises(ValueError, match=reason):
            supported(spec, "gpu", q_dtype)


def test_a_call_takes_what_its_arguments_allow(caplog):
    def kernels(dtype: str) -> int:
        pages = jax.ShapeDtypeStruct(kv_cache_shape(SPEC), dtype)
        q, k = (jax.ShapeDtypeStruct((4, heads, 128), dtype) for heads in (8, 2))
        rows = [jax.ShapeDtypeStruct(shape, "int32") for shape in ((4,), (4, 16), (5,), (1,))]
        attend = functools.partial(ragged_paged_attention, sm_scale=1.0, decode_only=True)
        return str(jax.make_jaxpr(attend)(q, k, k, pages, *rows)).count("name=paged_attention_")

    with described("NVIDIA H200"), caplog.at_level(logging.WARNING):
        assert kernels("bfloat16") > 0
        assert not caplog.records
        assert kernels("float32") == 0
        assert len(caplog.records) == 1
