"""Tool loops of the clients that people have, against a model whose template is scripted.

Each program of `clients/` is written as a user of its library would write it, runs the loop in several ways, and tells
of each what the tool was asked and what came out. `make clients` installs the frameworks, and the clients for Node.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from scripted_template import SCRIPTED_ARGUMENTS, SCRIPTED_TEMPLATE

PROGRAMS = Path(__file__).parents[1] / "clients"
INSTALLED = Path(__file__).parents[3] / ".clients"


def run_loops(server_url: str, command: list[str], *, environment: dict[str, str] | None = None) -> list[dict]:
    result = subprocess.run(
        [*command, server_url], capture_output=True, text=True, timeout=120, env=os.environ | (environment or {})
    )
    assert result.returncode == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


def assert_each_loop_went_through(loops: list[dict], num_ways: int) -> None:
    assert len({loop["way"] for loop in loops}) == num_ways
    for loop in loops:
        assert loop["cities"] == [SCRIPTED_ARGUMENTS["city"]], loop["way"]
        assert loop["answer"] == "The tool says: 21 degrees", loop["way"]


@pytest.fixture
def url(start_stub, tmp_path) -> str:
    template = tmp_path / "scripted.jinja"
    template.write_text(SCRIPTED_TEMPLATE)
    # Pydantic AI asks Anthropic's API for 16,384 tokens where its user sets no limit.
    return start_stub({"max_model_len": 20_480}, chat_template=str(template), tool_call_parser="hermes").url


@pytest.mark.parametrize(("program", "num_ways"), [("openai_loop", 4), ("anthropic_loop", 3)])
def test_an_official_clients_tool_loop_goes_through(url, program, num_ways):
    assert_each_loop_went_through(run_loops(url, [sys.executable, str(PROGRAMS / f"{program}.py")]), num_ways)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("program", "num_ways"), [("openai_agents", 4), ("pydantic_agents", 6), ("langchain_agents", 6)]
)
def test_an_agent_frameworks_tool_loop_goes_through(url, program, num_ways):
    python = INSTALLED / "python" / "bin" / "python"
    assert python.exists(), "the frameworks are missing: make clients"
    assert_each_loop_went_through(run_loops(url, [str(python), str(PROGRAMS / f"{program}.py")]), num_ways)


@pytest.mark.nightly
@pytest.mark.parametrize(("program", "num_ways"), [("openai_node", 4), ("anthropic_node", 2)])
def test_a_node_clients_tool_loop_goes_through(url, tmp_path, program, num_ways):
    node = shutil.which("node")
    if node is None:
        pytest.skip("there is no Node here")
    packages = INSTALLED / "node" / "node_modules"
    assert packages.exists(), "the clients are missing: make clients"
    # Node looks for packages beside the program.
    for source in PROGRAMS.glob("*.mjs"):
        shutil.copy(source, tmp_path)
    (tmp_path / "node_modules").symlink_to(packages)
    assert_each_loop_went_through(run_loops(url, [node, str(tmp_path / f"{program}.mjs")]), num_ways)
