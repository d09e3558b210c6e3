"""Run directories: a live engine's stay, a killed engine's go, and what is not an engine's is nobody's business."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncengine.run_dir import OWNER_FILE, RunDir, in_use, remove_stale
from asyncengine.wire.pipes import make_run_dir


@pytest.fixture(autouse=True)
def parent(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="d-") as path:
        monkeypatch.setattr(tempfile, "tempdir", path)
        yield Path(path)


def test_engines_side_by_side_keep_their_directories(parent: Path) -> None:
    one, two = RunDir(), RunDir()
    remove_stale(parent)
    assert sorted(parent.iterdir()) == sorted([one.path, two.path])
    assert one.path.stat().st_mode & 0o777 == 0o700
    one.remove()
    assert [*parent.iterdir()] == [two.path]
    two.remove()
    two.remove()
    assert [*parent.iterdir()] == []


def test_the_directories_of_living_engines_are_found_the_newest_first(parent: Path) -> None:
    one, two = RunDir(), RunDir()
    os.utime(one.path, ns=(1, 1))
    left = make_run_dir()
    (left / OWNER_FILE).touch()
    (parent / "asyncengine-other").mkdir()
    assert in_use(parent) == [two.path, one.path]
    two.remove()
    assert in_use(parent) == [one.path]
    assert left.exists(), "to look is not to remove"
    one.remove()


def test_a_directory_that_nobody_holds_is_removed_with_all_it_holds(parent: Path) -> None:
    left = make_run_dir()
    (left / OWNER_FILE).touch()
    (left / "tokenizer.0").touch()
    remove_stale(parent)
    assert [*parent.iterdir()] == []


def test_what_is_not_a_run_directory_of_an_engine_is_left_alone(parent: Path) -> None:
    unmarked = make_run_dir()
    (unmarked / "notes").touch()
    (parent / "asyncengine-file").touch()
    (parent / "other").mkdir()
    (parent / "other" / OWNER_FILE).touch()
    linked = make_run_dir()
    (linked / OWNER_FILE).symlink_to(parent / "other" / OWNER_FILE)
    before = sorted(parent.rglob("*"))
    remove_stale(parent)
    assert sorted(parent.rglob("*")) == before


def test_a_directory_of_another_user_is_left_alone(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = make_run_dir()
    (left / OWNER_FILE).touch()
    monkeypatch.setattr(os, "geteuid", lambda: left.stat().st_uid + 1)
    remove_stale(parent)
    assert left.exists()


def test_a_file_system_without_locks_leaves_the_directory_unmarked(
    parent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(fd: int, operation: int) -> None:
        raise OSError("Function not implemented")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    run_dir = RunDir()
    remove_stale(parent)
    assert [*parent.iterdir()] == [run_dir.path]
    assert [*run_dir.path.iterdir()] == []
    run_dir.remove()
    assert [*parent.iterdir()] == []
