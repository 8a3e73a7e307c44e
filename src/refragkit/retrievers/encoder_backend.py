"""Runs an encoder's transformer in ONNX Runtime or OpenVINO; everything around it stays sentence-transformers'.

Differs: sentence-transformers' own backends go through optimum, whose releases (optimum-onnx 0.1.0, optimum-intel
2.2.0) refuse the transformers that this package needs. Here torch exports the forward pass itself, once, into the
cache.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import logging
import os
import shutil
import uuid
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from refragkit.errors import RetrievalError

logger = logging.getLogger(__name__)

Arrays = dict[str, NDArray[Any]]
#: What each backend imports, and what only its export does.
PACKAGES = {"onnx": (("onnxruntime",), ("onnx", "onnxscript")), "openvino": (("openvino",), ())}
_FILES = {"onnx": "model.onnx", "openvino": "model.xml"}


def require_backend(backend: str, folder: Path | None) -> None:
    """Check that a backend is installed.

    Args:
        backend: ``onnx`` or ``openvino``.
        folder: where an export may be already.

    Raises:
        RetrievalError: names what is missing and the extra that has it.
    """
    to_run, to_export = PACKAGES[backend]
    exported = folder is not None and (folder / _FILES[backend]).is_file()
    missing = [p for p in (*to_run, *(() if exported else to_export)) if importlib.util.find_spec(p) is None]
    if missing:
        raise RetrievalError(
            f"retriever.backend={backend} needs {' and '.join(missing)}, not installed here: pip install "
            f"'refragkit[{backend}]', or choose backend=torch"
        )


def exchange_forward(model: Any, backend: str, folder: Path) -> None:
    """Let a backend compute the forward pass of a sentence-transformers model's transformer.

    Args:
        model: on the CPU, in float32.
        backend: ``onnx`` or ``openvino``.
        folder: where the exported graph is, or will be.

    Raises:
        RetrievalError: the backend is not installed, or can't take this model.
    """
    require_backend(backend, folder)
    transformer = model[0].model
    features = model.preprocess(["a text", "another, longer text"])
    accepted = inspect.signature(transformer.forward).parameters
    names = [n for n, v in features.items() if isinstance(v, torch.Tensor) and n in accepted]
    if not (folder / _FILES[backend]).is_file():
        logger.info("exporting the sentence encoder to %s, once: %s", backend, folder)
        _export(transformer, backend, names, tuple(features[n] for n in names), folder)
    run = _session(backend, folder / _FILES[backend], names)

    def forward(**inputs: Any) -> dict[str, torch.Tensor]:
        arrays = {n: inputs[n].cpu().numpy() for n in names}
        return {"last_hidden_state": torch.from_numpy(run(arrays))}

    # sentence-transformers chose a method and its parameters when it loaded the model; only its body changes.
    transformer.forward = forward


class _LastHiddenState(torch.nn.Module):
    """The transformer with tensors by position and one tensor out, as exporters want it."""

    def __init__(self, transformer: Any, names: Sequence[str]) -> None:
        super().__init__()
        self.transformer = transformer
        self.names = names

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        inputs = dict(zip(self.names, tensors, strict=True))
        out: torch.Tensor = self.transformer(**inputs, return_dict=True).last_hidden_state
        return out


def _export(
    transformer: Any, backend: str, names: Sequence[str], example: tuple[torch.Tensor, ...], folder: Path
) -> None:
    temporary = folder.with_name(f"{folder.name}.tmp-{uuid.uuid4().hex[:8]}")
    module = _LastHiddenState(transformer, names).eval()
    try:
        temporary.mkdir(parents=True)
        with warnings.catch_warnings():  # about tracing in general, and torch's own deprecations
            warnings.simplefilter("ignore")
            if backend == "onnx":
                sizes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("tokens")}
                torch.onnx.export(
                    module,
                    example,
                    str(temporary / _FILES[backend]),
                    dynamo=True,
                    verbose=False,
                    input_names=list(names),
                    output_names=["last_hidden_state"],
                    dynamic_shapes=(tuple(sizes for _ in names),),
                )
            else:
                openvino: Any = importlib.import_module("openvino")
                graph = openvino.convert_model(module, example_input=example)
                for port, name in zip(graph.inputs, names, strict=True):
                    port.set_names({name})
                openvino.save_model(graph, str(temporary / _FILES[backend]), compress_to_fp16=False)
        try:
            temporary.replace(folder)
        except OSError:
            if not (folder / _FILES[backend]).is_file():  # unless another process was first
                raise
    except Exception as error:
        raise RetrievalError(
            f"retriever.backend={backend}: this encoder can't be exported to {folder} ({type(error).__name__}: "
            f"{str(error).splitlines()[0] if str(error) else ''}); choose backend=torch"
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _session(backend: str, file: Path, names: Sequence[str]) -> Callable[[Arrays], NDArray[np.float32]]:
    """The graph as a function of named arrays, on as many threads as torch uses."""
    threads = torch.get_num_threads()
    try:
        if backend == "onnx":
            onnxruntime: Any = importlib.import_module("onnxruntime")
            options = onnxruntime.SessionOptions()
            options.intra_op_num_threads = threads
            session = onnxruntime.InferenceSession(
                str(file), sess_options=options, providers=["CPUExecutionProvider"]
            )

            def run(arrays: Arrays) -> NDArray[np.float32]:
                return np.asarray(session.run(None, arrays)[0])

            return run
        openvino: Any = importlib.import_module("openvino")
        # Else it would compute in bfloat16 where the CPU has it.
        settings = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": str(threads)}
        compiled = openvino.Core().compile_model(str(file), "CPU", settings)
        return lambda arrays: np.array(compiled([arrays[n] for n in names])[0])
    except Exception as error:
        raise RetrievalError(
            f"retriever.backend={backend}: {file} can't be opened ({error}); delete {os.fspath(file.parent)}"
        ) from error
