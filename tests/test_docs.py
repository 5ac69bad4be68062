"""What the documents say about the code."""

import re
from dataclasses import fields
from pathlib import Path

import pytest

import jaxllm.errors
from jaxllm import EngineConfig, RequestOptions, SamplingParams
from jaxllm.models.registry import FAMILIES

ROOT = Path(__file__).parents[1]
DOCUMENTS = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_within_the_repository_lead_somewhere(document):
    links = re.findall(r"\]\(([^)#:\s]+)(?:#[\w-]*)?\)", document.read_text())
    assert [link for link in links if not (document.parent / link).exists()] == []


def test_options_md_has_every_option_and_default():
    text = (ROOT / "docs" / "options.md").read_text()
    for field in (*fields(EngineConfig), *fields(RequestOptions)):
        assert f"| `{field.name}` |" in text
    for field in fields(SamplingParams):
        default = field.default if isinstance(field.default, float | int) and field.type is not bool else None
        shown = f"`{field.default}`" if default is None else default
        assert f"| `{field.name}` | {shown} |" in text


def test_models_md_has_every_architecture():
    text = (ROOT / "docs" / "models.md").read_text()
    assert all(f"| `{architecture}` |" in text for architecture in FAMILIES)


def test_architecture_md_draws_the_tree_of_errors():
    assert (jaxllm.errors.__doc__ or "").split("\n\n")[1] in (ROOT / "docs" / "architecture.md").read_text()
