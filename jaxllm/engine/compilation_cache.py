"""Compiled programs on disk, from where the next start reads them: JAX's persistent compilation cache."""

import functools
import logging
from typing import Any

import jax
from jax._src import compilation_cache

from jaxllm.config import ResolvedConfig

logger = logging.getLogger(__name__)


def use_compilation_cache(config: ResolvedConfig) -> None:
    """Keeps compiled programs on disk, unless JAX has been told where already."""
    if config.compilation_cache_dir and not jax.config.jax_compilation_cache_dir:
        jax.config.update("jax_compilation_cache_dir", config.compilation_cache_dir)
    replace_damaged_entries()


def replace_damaged_entries() -> None:
    """From here on an entry that cannot be read is deleted, so that its program is written anew when it is compiled.

    JAX leaves it there: it would warn and compile at every start. That is so after a process ended as it wrote.
    """
    read = compilation_cache.get_executable_and_time
    if hasattr(read, "__wrapped__"):
        return

    @functools.wraps(read)
    def read_or_delete(cache_key: str, *args: Any, **options: Any) -> Any:
        try:
            return read(cache_key, *args, **options)
        except OSError:  # It may be there another time.
            raise
        except Exception as error:
            # `_path` is where JAX has it, remote folders included.
            entry = compilation_cache._cache._path / f"{cache_key}-cache"  # type: ignore[union-attr]
            entry.unlink(missing_ok=True)
            logger.warning("%s was damaged and is made anew: %s", entry, error)
            return None, None

    compilation_cache.get_executable_and_time = read_or_delete
