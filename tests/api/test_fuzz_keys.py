"""Whatever a key file or a header says: keys or a sentence, in which no key is shown."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fuzzing import counted, mutate, slice_of

from asyncengine.api_keys import API_KEY_VARIABLE, digest_of, known_key, read_api_keys
from asyncengine.config import ServiceClass
from asyncengine.errors import StartupError

SECRET = "sekret"
WORDS = (
    f"{SECRET}-one",
    f"{SECRET}-two~!#$%",
    SECRET,
    f"{SECRET}={SECRET}",
    f"tenant={SECRET}",
    f"class={SECRET}",
    f"{SECRET}-\u00e9-{SECRET}",
    f"{SECRET}-{'x' * 512}",
    "tenant=ant",
    "tenant=",
    "tenant=a/b",
    "class=background",
    "class=interactive",
    "class=",
    "=",
)
GAPS = (" ", "  ", "\t", "\n", "\r\n", "\n\n", "\x0b", "\x1c", "\u2028", "\u00a0", "\ufeff", "\0")


def test_a_key_file_is_read_or_refused_in_a_sentence_that_shows_no_key(tmp_path: Path) -> None:
    path = tmp_path / "keys"

    @slice_of(300)
    @given(st.data())
    def fuzz(data: st.DataObject) -> None:
        words = data.draw(st.lists(st.one_of(st.sampled_from(WORDS), st.sampled_from(GAPS)), max_size=12))
        raw = "".join(words).encode()
        path.write_bytes(mutate(raw, data.draw) if raw and data.draw(st.booleans()) else raw)
        environ = {API_KEY_VARIABLE: data.draw(st.sampled_from(("", *WORDS, "sekret-\udcff-sekret")))}
        tried.append(1)
        try:
            keys = read_api_keys(str(path), environ)
        except StartupError as error:
            refused.append(error)
            return
        assert keys
        assert len({key.digest for key in keys}) == len(keys)
        assert all(1 <= len(key.tenant) <= 64 for key in keys)
        assert all(key.service_class in (None, *get_args(ServiceClass)) for key in keys)
        assert f"{SECRET}-" not in repr(keys)

    refused: list[StartupError] = []
    with counted("key files") as tried:
        fuzz()
    assert 0 < len(refused) < len(tried)
    for error in refused:
        assert SECRET not in "".join(traceback.format_exception_only(error))
        assert error.__suppress_context__ or error.__context__ is None


@pytest.mark.parametrize("key", [f"{SECRET}-one", f"{SECRET}-two~!#$%"])
def test_nothing_but_the_key_itself_is_the_key(tmp_path: Path, key: str) -> None:
    path = tmp_path / "keys"
    path.write_text(f"another-{SECRET}\n{key} tenant=ant\n")
    keys = read_api_keys(str(path), {})

    @slice_of(100)
    @given(st.data())
    def fuzz(data: st.DataObject) -> None:
        shown = mutate(key.encode(), data.draw).decode("utf-8", "surrogateescape")
        found = known_key(shown, keys)
        assert found == (keys[1] if shown == key else None)
        tried.append(1)

    assert keys[1].digest == digest_of(key)
    with counted("shown keys") as tried:
        fuzz()
