"""
Bytes that can be checked: tensors in the safetensors format, with a kind, a version, a JSON header and a checksum in
its metadata. Nothing in them is ever executed; what is damaged, cut short, newer or foreign is refused by name.
"""

import hashlib
import json
import os
from pathlib import Path
from threading import get_ident
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save


def pack(kind: str, version: int, header: dict[str, Any], tensors: dict[str, torch.Tensor]) -> bytes:
    """What [`unpack`] reads."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    text = json.dumps(header)
    metadata = {"format": kind, "version": str(version), "header": text, "checksum": _checksum(text, tensors)}
    return save(tensors, metadata)


def unpack(
    data: bytes, kind: str, version: int, what: str, name: str
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """
    Args:
        data (`bytes`): Made by [`pack`].
        kind (`str`), version (`int`): What is expected; the newest version that is understood.
        what (`str`): What the kind is called in errors.
        name (`str`): What the bytes are called in errors.

    Raises:
        ValueError: they are damaged, cut short, of a newer version or of another kind.
    """
    try:
        size = int.from_bytes(data[:8], "little")
        metadata = json.loads(data[8 : 8 + size])["__metadata__"]
        found, found_version = metadata["format"], int(metadata["version"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise ValueError(f"{name} holds no {what}, or is damaged.") from error
    if found != kind:
        raise ValueError(f"{name} holds no {what} but {found!r}.")
    if found_version > version:
        raise ValueError(
            f"{name} was written by a newer version of this package (format {found_version}, known: {version})."
        )
    try:
        tensors = load(data)
        if metadata["checksum"] != _checksum(metadata["header"], tensors):
            raise ValueError("the checksum differs")
        return json.loads(metadata["header"]), tensors
    except (SafetensorError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise ValueError(f"{name} is damaged: {error}.") from error


def write(path: str | os.PathLike, data: bytes) -> None:
    """Writes a file that appears under its name when it is complete."""
    path = Path(os.path.realpath(path))  # a link stays, and its target is written
    if not path.parent.is_dir():
        raise FileNotFoundError(f"There is no folder {path.parent}.")
    unfinished = path.with_name(f".{os.getpid()}.{get_ident()}")
    try:
        unfinished.write_bytes(data)
        os.replace(unfinished, path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def _checksum(text: str, tensors: dict[str, torch.Tensor]) -> str:
    """safetensors notices a wrong length, but not a wrong byte."""
    digest = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        digest.update(f"{name} {tensors[name].dtype} {list(tensors[name].shape)}".encode())
        digest.update(tensors[name].reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
