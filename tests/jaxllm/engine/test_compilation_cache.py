"""What was compiled is read again, and what cannot be read is replaced."""

import logging
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import compilation_cache

from jaxllm.engine.compilation_cache import replace_damaged_entries

READ = "/jax/compilation_cache/cache_hits"


@pytest.fixture
def cache_folder(tmp_path):
    """JAX's cache, in a folder of its own, which takes the smallest programs."""
    options = {
        "jax_enable_compilation_cache": True,
        "jax_compilation_cache_dir": str(tmp_path),
        "jax_persistent_cache_min_compile_time_secs": 0,
    }
    before, original = {name: getattr(jax.config, name) for name in options}, compilation_cache.get_executable_and_time
    for name, value in options.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    yield tmp_path
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    compilation_cache.get_executable_and_time = original


def is_read():
    """Compiles a program, as a process does that has just started. Whether it was in the cache."""
    num_read = 0

    def listen(event, **_):
        nonlocal num_read
        num_read += event == READ

    jax.monitoring.register_event_listener(listen)
    try:
        program = jax.jit(lambda x: jnp.sin(x) * 2.0).lower(np.zeros(8, np.float32)).compile()
    finally:
        jax.monitoring.unregister_event_listener(listen)
    assert program(np.zeros(8, np.float32)).shape == (8,)
    return num_read == 1


@pytest.mark.parametrize(
    "damage",
    [
        lambda entry: entry[: len(entry) // 2],
        lambda _: b"",
        lambda _: b"no program",
        lambda _: zlib.compress(b"1234no"),
    ],
    ids=["cut", "empty", "other bytes", "another content"],
)
def test_a_damaged_entry_is_replaced_once(cache_folder, damage, caplog):
    replace_damaged_entries()
    replace_damaged_entries()  # There may be several engines in a process.
    assert not is_read()
    assert is_read()
    [entry] = cache_folder.glob("*-cache")
    entry.write_bytes(damage(entry.read_bytes()))
    caplog.set_level(logging.WARNING)
    assert not is_read()  # Warnings are errors here: JAX has none.
    [record] = caplog.records
    assert str(entry) in record.message
    assert "made anew" in record.message
    caplog.clear()
    assert is_read()
    assert not caplog.records


def test_an_entry_that_cannot_be_reached_stays(cache_folder):
    replace_damaged_entries()
    assert not is_read()
    [entry] = cache_folder.glob("*-cache")
    entry.rename(cache_folder / "kept")
    entry.mkdir()  # which no process can read, not even root's
    with pytest.warns(UserWarning, match="Error reading persistent compilation cache entry"):
        assert not is_read()
    assert entry.exists()
