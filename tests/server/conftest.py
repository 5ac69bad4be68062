"""Live servers, over the stub engine or a tiny model."""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tiny_models import write_tiny_model
from tiny_tokenizer import TOOL_CHAT_TEMPLATE, write_tokenizer

from jaxllm import EngineConfig

if TYPE_CHECKING:
    from fake_llm import FakeLLM
    from live_server import LiveServer
    from serve_process import ServeProcess

sys.path.append(str(Path(__file__).parent))  # The core process finds stub_engine there, too.

STUB = "stub_engine:StubEngine"
JAX = "jaxllm.engine.start:start_core"


@pytest.fixture(scope="session")
def stub_folder(tmp_path_factory) -> Path:
    """What the stub engine needs of a model: a tokenizer whose tokens are bytes."""
    folder = write_tiny_model("llama", tmp_path_factory.mktemp("stub-model"))
    write_tokenizer(folder, TOOL_CHAT_TEMPLATE)
    return folder


@pytest.fixture(scope="session")
def tiny_server_folder(tmp_path_factory) -> Path:
    """A tiny Llama with such a tokenizer."""
    folder = write_tiny_model("llama", tmp_path_factory.mktemp("tiny-model"))
    write_tokenizer(folder, TOOL_CHAT_TEMPLATE)
    return folder


@pytest.fixture
def start_stub(stub_folder) -> "Iterator[Callable[..., LiveServer]]":
    """(engine_options={…}, **server options) -> a server of the test's own, over the stub engine."""
    from live_server import start_server

    with ExitStack() as stack:

        def start(engine_options: dict[str, Any] | None = None, engine: str = STUB, **options: Any) -> "LiveServer":
            engine_config = EngineConfig(model=str(stub_folder), **(engine_options or {}))
            return start_server(stack, engine_config, engine, **{"served_model_name": ["stub"]} | options)

        yield start


@pytest.fixture
def run_serve(stub_folder, tmp_path) -> "Iterator[Callable[..., ServeProcess]]":
    """(**options of ServeProcess) -> `jaxllm serve` in a process of its own."""
    from serve_process import ServeProcess

    started = []

    def run(**options: Any) -> "ServeProcess":
        started.append(ServeProcess(tmp_path, stub_folder, **options))
        return started[-1]

    yield run
    for server in started:
        server.close()


@pytest.fixture(scope="session")
def _stub_server(stub_folder) -> "Iterator[LiveServer]":
    from live_server import start_server

    with ExitStack() as stack:
        yield start_server(stack, EngineConfig(model=str(stub_folder)), STUB, served_model_name=["stub"])


@pytest.fixture
def stub_server(_stub_server) -> "Iterator[LiveServer]":
    """The stub engine, as the model "stub": 32 rows, context of 2,048, pages of 16 tokens, 2 ms a step. Shared: leave
    it serving. Without keys; the admin key is `admin_headers`."""
    yield _stub_server
    _stub_server.wait_until_idle()


@pytest.fixture(scope="session")
def _tiny_server(tiny_server_folder) -> "Iterator[LiveServer]":
    from live_server import start_server

    with ExitStack() as stack:
        engine_config = EngineConfig(
            model=str(tiny_server_folder),
            dtype="float32",
            max_num_seqs=16,
            max_num_batched_tokens=128,
            page_size=8,
            num_pages=16 * 16 + 1,
            compilation_cache_dir="",
        )
        yield start_server(stack, engine_config, JAX, served_model_name=["tiny"])


@pytest.fixture
def tiny_server(_tiny_server) -> "Iterator[LiveServer]":
    """A tiny Llama on JAX, as the model "tiny": 16 rows, context of 128, pages of 8 tokens; float32. Shared."""
    yield _tiny_server
    _tiny_server.wait_until_idle()


@pytest.fixture
def admin_headers() -> dict[str, str]:
    from live_server import ADMIN_KEY

    return {"Authorization": f"Bearer {ADMIN_KEY}"}


@pytest.fixture
def fake_llm(monkeypatch) -> "type[FakeLLM]":
    """It takes the place of `jaxllm.LLM`."""
    from fake_llm import FakeLLM

    import jaxllm.llm

    monkeypatch.setattr(jaxllm.llm, "LLM", FakeLLM)
    monkeypatch.setattr(FakeLLM, "made", [])
    return FakeLLM
