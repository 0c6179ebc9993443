"""Where and with what a run was made."""

import hashlib
import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers import PreTrainedModel

from .config import RunConfig, without_folders
from .data import SAMPLE

PACKAGES = ("torch", "transformers", "accelerate", "bitsandbytes", "datasets", "dejavuu", "economize")


def header(config: RunConfig, model: PreTrainedModel, arguments: list[str]) -> dict[str, Any]:
    """The first line of a file. Folders of this machine are left out of it."""
    words = [without_folders(argument) for argument in arguments]
    return {
        "type": "header",
        "command": f"python -m eval.run {shlex.join(words)}",
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "config": config.public_dict() | {"data_sha256": _data_sha256(config)},
        "environment": environment(model),
    }


def environment(model: PreTrainedModel) -> dict[str, Any]:
    """Versions and the machine."""
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        "hf_specstate": _revision(),
        **{name: _version(name) for name in PACKAGES},
        "python": sys.version.split()[0],
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu_name(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "gpus": gpus,
        "device": str(model.device),
        "dtype": str(model.dtype).removeprefix("torch."),
        "attention": model.config._attn_implementation,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _revision() -> str:
    """The commit, and whether files have changed since."""
    folder = Path(__file__).parent
    try:
        options: dict[str, Any] = {"cwd": folder, "capture_output": True, "text": True, "check": True}
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], **options).stdout.strip()
        changed = subprocess.run(["git", "status", "--porcelain", "--", "../hf_specstate", "."], **options).stdout
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    changed_code = [line for line in changed.splitlines() if line.endswith(".py")]
    return commit + (" with changes" if changed_code else "")


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or "unknown"


def _data_sha256(config: RunConfig) -> str | None:
    path = SAMPLE if config.data == "sample" else Path(config.data)
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None
