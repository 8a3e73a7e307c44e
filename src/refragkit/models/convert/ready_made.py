"""``model=hybrid model.size=smollm2``: the pretrained hybrid that needs no hub, made on first use.

SmolLM2-135M-Instruct with six of its 30 attention blocks as Mamba-2, calibrated and shortly distilled on the bundled
passages and training questions. A longer distillation on more text (``method=distill``) gives a better one.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock

from refragkit.console import progress_bar
from refragkit.models.checksums import CHECKSUMS, is_whole, write_checksums

if TYPE_CHECKING:
    from refragkit.methods.recipes import Distill
    from refragkit.models.convert.blocks import RecurrentKind

log = logging.getLogger("refragkit")

LAYERS = (12, 21, 24, 25, 26, 28)
"""Cheap in perplexity, and copying does without them (``convert.layers=auto`` shows it)."""
TO: RecurrentKind = "M"
SEED = 0
CALIBRATION_TOKENS = 4096
ALIGN_TOKENS = 147456
MATCH_TOKENS = 16384
_TEXT_TOKENS = 49152
_FORMAT = 1  # one more whenever the same inputs would give another model


def smollm2_hybrid(cache_dir: Path) -> Path:
    """The folder of the pretrained hybrid: what is kept under ``<cache_dir>/pretrained``, else made now.

    Takes two to four minutes on two cores. Processes that ask at once wait for one of them.

    Raises:
        CheckpointError: SmolLM2 is not installed.
    """
    from refragkit.models.pretrained import SMOLLM2, resolve_pretrained

    source = resolve_pretrained(SMOLLM2, cache_dir)
    target = source.with_name(f"smollm2-hybrid-{_key(source)}")
    if is_whole(target):
        return target
    with FileLock(target.parent / f".{target.name}.lock"):
        if is_whole(target):
            return target
        if target.exists():
            log.warning("%s does not match its %s and is made again", target, CHECKSUMS)
            shutil.rmtree(target)
        for left in target.parent.glob(f".{target.name}-*.tmp"):  # of a process that was killed
            shutil.rmtree(left, ignore_errors=True)
        work = Path(tempfile.mkdtemp(prefix=f".{target.name}-", suffix=".tmp", dir=target.parent))
        try:
            _make(source, work, cache_dir)
            write_checksums(work)
            work.chmod(0o755)
            work.replace(target)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return target


def recipe() -> Distill:
    """How it is trained."""
    from refragkit.methods.recipes import Distill

    return Distill(
        text_tokens=_TEXT_TOKENS,
        recall_share=0.2,
        align_tokens=ALIGN_TOKENS,
        align_matrix_lr=2e-3,
        align_other_lr=3e-3,
        match_tokens=MATCH_TOKENS,
        match_matrix_lr=2e-4,
        match_other_lr=4e-4,
        rest="frozen",
        rest_lr=0.0,
        lora_rank=1,
        cache_gib=4,
        keep_cache=False,
        log_every=20,
    )


def _make(source: Path, folder: Path, cache_dir: Path) -> None:
    import torch

    from refragkit.data.tokenizer import Tokenizer
    from refragkit.methods.distill import train_stages
    from refragkit.models.checkpoint import load_model, save_model
    from refragkit.models.convert.activation_cache import cached_activations
    from refragkit.models.convert.blocks import convert_blocks
    from refragkit.models.convert.calibrate import calibrate
    from refragkit.models.convert.card import Recipe, write_card
    from refragkit.models.convert.evaluate import WINDOW
    from refragkit.models.convert.text import fingerprint, split_text, windows, with_recall
    from refragkit.training.hardware import Hardware

    started = time.perf_counter()
    log.info("making the pretrained hybrid from %s, once: two to four minutes on two cores ...", source.name)
    tokenizer = Tokenizer.load(source)
    teacher = load_model(source).float().eval()
    texts = split_text(_bundled_pieces(tokenizer)).calibration
    settings, hardware = recipe(), Hardware()
    text = windows(texts, tokenizer, settings.text_tokens, WINDOW, "bundled sample")
    fitted = text[: CALIBRATION_TOKENS // WINDOW]
    text = with_recall(text, settings.recall_share, SEED)
    student = convert_blocks(teacher, LAYERS, TO, seed=SEED).eval()
    with hardware.autocast():
        reports = calibrate(student, teacher, LAYERS, torch.split(fitted, 4), "cal")
    with ExitStack() as stack:
        with hardware.autocast(), progress_bar("reading", len(text)) as advance:
            cache = stack.enter_context(
                cached_activations(
                    teacher,
                    LAYERS,
                    text,
                    cache_dir / "activations",
                    max_bytes=settings.cache_gib * 2**30,
                    advance=advance,
                )
            )
        student, losses = train_stages(
            student,
            cache,
            settings,
            hardware,
            seed=SEED,
            folder=folder,
            log_metrics=lambda values, step: None,
            progress=progress_bar,
        )
    save_model(student, folder, tokenizer)
    card = Recipe(
        source="smollm2",
        folder=source,
        layers=list(LAYERS),
        to=TO,
        calibration="cal",
        calibration_tokens=fitted.numel(),
        text="the bundled passages and training questions",
        text_sha256=fingerprint(fitted),
        seed=SEED,
        command="model=hybrid model.size=smollm2",
        trained=f"alignment of each new mixer on {ALIGN_TOKENS:,} tokens, then matching the source's logits on"
        f" {MATCH_TOKENS:,} tokens (token ids `{fingerprint(text)}`)",
    )
    write_card(folder, card, reports, [])
    curve = losses["match_loss"]
    log.info(
        "the pretrained hybrid is ready: divergence from its source %.4f nats a token (before: %.4f), %.0f s",
        sum(curve[-5:]) / len(curve[-5:]),
        curve[0],
        time.perf_counter() - started,
    )


def _bundled_pieces(tokenizer: Any) -> Iterator[Any]:
    """The bundled passages that no validation question rests on, and the training questions."""
    from refragkit.data.datamodule import MultiHopQA
    from refragkit.models.convert.text import question_pieces
    from refragkit.types import Question

    sample = MultiHopQA()
    sample.prepare()
    tested = {i for q in sample.validation if isinstance(q, Question) for i in q.supporting_ids}
    corpus = [document for document in sample.corpus or () if document.doc_id not in tested]
    yield from corpus
    yield from question_pieces([q for q in sample.train if isinstance(q, Question)], corpus, tokenizer)


def _key(source: Path) -> str:
    import dataclasses

    parts = [_FORMAT, LAYERS, TO, SEED, CALIBRATION_TOKENS, _TEXT_TOKENS, dataclasses.asdict(recipe())]
    digest = hashlib.sha256(json.dumps([*parts, source.name], sort_keys=True).encode())
    return digest.hexdigest()[:12]
