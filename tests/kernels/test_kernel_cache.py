"""Where compiled kernels are kept."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
from triton import knobs

from gpu_runner.kernels.kernel_cache import use_writable_cache


@pytest.fixture(autouse=True)
def own_folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(knobs.cache, "dir", knobs.cache.dir)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.fixture
def unusable(tmp_path: Path) -> Path:
    """A folder that cannot be made, not even by root."""
    (tmp_path / "file").write_text("")
    return tmp_path / "file" / "cache"


def test_a_cache_that_can_be_written_is_used_as_configured(tmp_path: Path) -> None:
    knobs.cache.dir = str(tmp_path / "deep" / "cache")
    assert use_writable_cache() == tmp_path / "deep" / "cache"
    assert (tmp_path / "deep" / "cache").is_dir()


def test_without_one_kernels_are_kept_in_a_folder_of_the_user(tmp_path: Path, unusable: Path) -> None:
    knobs.cache.dir = str(unusable)
    fallback = tmp_path / f"asyncengine-kernels-{os.geteuid()}"
    assert use_writable_cache() == fallback
    assert knobs.cache.dir == str(fallback)
    assert fallback.stat().st_mode & 0o777 == 0o700
    knobs.cache.dir = str(unusable)
    assert use_writable_cache() == fallback


def test_a_folder_that_others_may_write_is_not_used(tmp_path: Path, unusable: Path) -> None:
    fallback = tmp_path / f"asyncengine-kernels-{os.geteuid()}"
    fallback.mkdir()
    os.chmod(fallback, 0o777)
    knobs.cache.dir = str(unusable)
    chosen = use_writable_cache()
    assert chosen != fallback
    assert chosen.parent == tmp_path
    assert chosen.stat().st_mode & 0o777 == 0o700
