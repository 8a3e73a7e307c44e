"""Supervised fine-tuning of an adapter by one process: sft, and the files that the seed trainer wrote."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import cast

from refragkit.adapters.peft_format import adapter_weights, write_adapter
from refragkit.methods.lora import Lora
from refragkit.methods.sft import SFTModule
from refragkit.models.weights_hash import weights_hash
from refragkit.types import Batch

FINAL_FILE = "adapter_final.safetensors"


class LoraModule(SFTModule):
    """Writes ``checkpoint_<step>.safetensors`` every ``save_every`` steps, and ``adapter_final.safetensors``."""

    @property
    def settings(self) -> Lora:
        """The recipe."""
        return cast(Lora, self.recipe)

    @property
    def adapter_folder(self) -> Path | None:
        """Where the run's adapters go; None for a module without a run."""
        folder = self.components.folder
        return None if folder is None else folder / "adapter"

    @cached_property
    def base_hash(self) -> str | None:
        """Of the model that is adapted; None for random weights."""
        path = self.components.model_path
        return None if path is None else weights_hash(path)

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        """As sft does, and keep the adapter where it is time."""
        super().training_step(batch, batch_idx)
        self._save_checkpoint(self.global_step)

    def on_train_end(self) -> None:
        """Keep what came of it."""
        self._save_adapter(FINAL_FILE)

    def _save_checkpoint(self, step: int) -> None:
        every = self.settings.save_every
        if every is not None and step % every == 0:
            self._save_adapter(f"checkpoint_{step}.safetensors")

    def _save_adapter(self, name: str) -> None:
        if self.adapter_folder is not None:
            write_adapter(adapter_weights(self.model, self.base_hash), self.adapter_folder, name)
