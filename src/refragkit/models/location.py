"""``model.path`` and local ``model.init``: from what a user points at to the model itself."""

from __future__ import annotations

from pathlib import Path

from refragkit.errors import CheckpointError


def model_location(path: str | Path, key: str = "model.path") -> Path:
    """The model folder (or single checkpoint file) that a path means.

    Args:
        path: a model folder, a single checkpoint file, or the folder of a run that holds one under ``model/``.
        key: the setting that holds the path, for messages.

    Raises:
        CheckpointError: nothing is there, or no model; for an adapter, what else is needed.
    """
    given = Path(path).expanduser()
    if not given.exists():
        raise CheckpointError(
            f"{key}: {given} does not exist; expected the folder of a model (with config.json) or of a run"
            " that trained one"
        )
    if given.is_file() or (given / "config.json").is_file():
        return given
    if (given / "model" / "config.json").is_file():
        return given / "model"
    for adapter in (given, given / "adapter"):
        if (adapter / "adapter_config.json").is_file():
            raise CheckpointError(
                f"{key}: {given} holds an adapter only, which belongs onto the model it was trained from; give"
                f" that model as model.path and this as adapter_path={adapter} (task=generate, chat and export"
                " take it)"
            )
    if (given / "summary.json").is_file():
        raise CheckpointError(
            f"{key}: the run in {given} saved no model (no model/config.json); its summary.json says how it"
            " ended"
        )
    raise CheckpointError(
        f"{key}: {given} is not a model folder: it has neither config.json nor model/config.json"
    )
