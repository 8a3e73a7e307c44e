"""Where a trained adapter is."""

from __future__ import annotations

from pathlib import Path

from refragkit.errors import CheckpointError


def adapter_location(path: str, key: str = "adapter_path") -> Path:
    """The folder of an adapter, or its file of weights.

    Args:
        path: that, or the folder of the run that trained it.
        key: the setting that holds the path, for messages.

    Raises:
        CheckpointError: there is none.
    """
    given = Path(path).expanduser()
    if given.is_file() and given.suffix == ".safetensors":
        return given
    for folder in (given, given / "adapter"):
        if (folder / "adapter_config.json").is_file():
            return folder
    raise CheckpointError(
        f"{key}: {given} "
        + ("holds no adapter (no adapter_config.json)" if given.exists() else "does not exist")
        + "; expected an adapter's folder or that of the run that trained it"
    )
