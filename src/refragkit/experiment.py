"""The composition root: check the configuration, build what it names, run the task, write the summary.

Only this module wires objects together. Components know nothing of each other's configuration: what one needs of
another (the tokenizer's size, whether the model is recurrent) comes from the built object.
"""

from __future__ import annotations

import logging
import os
import shlex
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from refragkit.errors import ConfigError, RefragError

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from refragkit.adapters.report import AdapterReport
    from refragkit.data.datamodule import DataModule
    from refragkit.data.tokenizer import Tokenizer
    from refragkit.models.base import SequenceModel
    from refragkit.retrievers.multi_hop import MultiHopRetriever
    from refragkit.rewards.base import Reward
    from refragkit.summary import Summary
    from refragkit.tracking.base import Tracking
    from refragkit.training.hardware import Hardware
    from refragkit.training.resume import EarlierRun
    from refragkit.types import Document

log = logging.getLogger("refragkit")


class Run:
    """One run: its configuration, its folder, and its components, each built on first use.

    Attributes:
        cfg: the checked configuration.
        folder: the run folder.
        tracking: where metrics go.
        summary: filled by the task; ``metrics`` and ``artifacts`` above all.
        checkpoint: from which a resumed run goes on; None from the start.
    """

    def __init__(
        self,
        cfg: DictConfig,
        folder: Path,
        tracking: Tracking,
        summary: Summary,
        checkpoint: Path | None = None,
    ) -> None:
        self.cfg = cfg
        self.folder = folder
        self.tracking = tracking
        self.summary = summary
        self.checkpoint = checkpoint
        self.seed: int = cfg.seed

    @property
    def cache_dir(self) -> Path:
        """Where tokenizers, vectors and indexes are kept between runs."""
        return Path(self.cfg.paths.outputs).absolute() / "cache"

    def _build(self, group: str, **injected: Any) -> Any:
        from refragkit.config import instantiate

        return instantiate(self.cfg, group, **injected)

    @cached_property
    def hardware(self) -> Hardware:
        """Devices, precision and micro batch size."""
        built: Hardware = self._build("hardware")
        built.apply()
        return built

    @cached_property
    def data(self) -> DataModule:
        """The prepared data."""
        data = self._data_module()
        data.prepare()
        return data

    def _data_module(self) -> DataModule:
        data: DataModule = self._build("data", cache_dir=self.cache_dir, seed=self.seed)
        return data

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of ``model.init`` or ``model.path`` where one is given, else the data's."""
        from refragkit.data.tokenizer import Tokenizer, has_tokenizer

        if self.model_path is None or self.cfg.data.get("tokenizer") is not None:
            return self.data.build_tokenizer(self.cache_dir)
        if not has_tokenizer(self.model_path):
            raise ConfigError(
                f"{self.model_path} holds a model without a tokenizer; give the folder of the one it was trained with"
                " as data.tokenizer=DIR"
            )
        return Tokenizer.load(self.model_path)

    @cached_property
    def model_path(self) -> str | None:
        """The folder of the model that ``model.init`` or ``model.path`` means, or None for random weights."""
        from refragkit.models.build import model_folder

        folder = model_folder(self.cfg.model, self.cache_dir)
        return None if folder is None else str(folder)

    @cached_property
    def model(self) -> SequenceModel:
        """The model to be trained, with its adapter applied."""
        model = self.build_model(self.tokenizer)
        if self.model_path is not None and self.cfg.choices.adapter == "none":
            model.float()  # updates are smaller than bfloat16's steps; hardware.precision says what computes
        self.apply_adapter(model)
        if self.hardware.compile:
            model.compile_blocks()
        return model

    def build_model(self, tokenizer: Tokenizer | None, *, any_kind: bool = False) -> SequenceModel:
        """The configured model without an adapter.

        Args:
            tokenizer: what it will read; None checks nothing. Tokens that our format adds to a pretrained tokenizer get
                embeddings.
            any_kind: take a pretrained model whatever option of the model group it is.
        """
        from refragkit.models.build import build_model, start_of
        from refragkit.models.vocabulary import embed_added_tokens

        cfg: dict[str, Any] = {str(key): value for key, value in self.cfg.model.items()}
        start = start_of(cfg)
        if any_kind and start is not None:
            cfg |= {"init": None, "path": self.model_path}
        added = start is not None and tokenizer is not None and tokenizer.added_ids
        vocab_size = None if tokenizer is None or added else tokenizer.vocab_size
        model = build_model(
            cfg,
            vocab_size=vocab_size,
            seed=self.seed,
            cache_dir=self.cache_dir,
            quantize=self.cfg.adapter.get("quantize"),
        )
        if tokenizer is not None and added:
            embed_added_tokens(model, tokenizer)
        return model

    def apply_adapter(self, model: SequenceModel) -> AdapterReport:
        """Put the configured adapter on ``model`` and count its parameters for the summary."""
        report: AdapterReport = self._build("adapter").apply(model, seed=self.seed, base=self.model_path)
        self.summary.total_parameters = report.total_parameters
        self.summary.trainable_parameters = report.trainable_parameters
        return report

    @cached_property
    def retriever(self) -> MultiHopRetriever | None:
        """The multi-hop retriever with its index open, or None with ``retriever=none``."""
        if self.cfg.choices.retriever == "none":
            return None
        return self.open_retriever(self.corpus)

    @cached_property
    def corpus(self) -> Sequence[Document]:
        """The data's passages; without the examples, where nothing has asked for those.

        Raises:
            ConfigError: the data has none.
        """
        corpus = self.data.corpus if "data" in self.__dict__ else self._data_module().read_corpus()
        if corpus is None:
            raise ConfigError(
                f"retriever={self.cfg.choices.retriever} needs a corpus, and data={self.cfg.choices.data} has none;"
                " set data.corpus=FILE_OR_FOLDER, or choose data=multihop_qa or retriever=none"
            )
        return corpus

    def open_retriever(self, corpus: Sequence[Document]) -> MultiHopRetriever:
        """The configured retriever with the index of ``corpus`` open."""
        return self.build_retriever().open_index(corpus, self.cache_dir)

    def build_retriever(self) -> MultiHopRetriever:
        """The configured retriever, without an index yet."""
        method = self.cfg.get("method") or {}
        retriever: MultiHopRetriever = self._build("retriever", cache_dir=self.cache_dir)
        for key in ("max_hops", "top_k_per_hop"):  # the method's values, unless the retriever's own are set
            if self.cfg.retriever.get(key) is None and method.get(key) is not None:
                setattr(retriever, key, method[key])
        return retriever

    @cached_property
    def reward(self) -> Reward:
        """The reward."""
        built: Reward = self._build("reward")
        return built

    def artifact(self, name: str, path: Path) -> None:
        """Record a file or folder of the run under ``name`` and upload it."""
        self.keep(name, path)
        self.tracking.log_artifact(path)

    def keep(self, name: str, path: Path) -> None:
        """Record a file or folder of the run under ``name`` in the summary only."""
        self.summary.artifacts[name] = str(path.relative_to(self.folder))

    def write_summary(self) -> None:
        """Write the summary as it stands, so that a killed run leaves what it had."""
        self.summary.write(self.folder / "summary.json")

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Send metrics to the tracking store and remember the latest value of each."""
        self.summary.metrics.update({k: float(v) for k, v in metrics.items()})
        self.tracking.log_metrics(metrics, step)


def run_experiment(cfg: DictConfig, folder: Path, command: str = "", sweep: Path | None = None) -> Summary:
    """Run one experiment to its end and write its ``summary.json``, whatever happens.

    Args:
        cfg: a composed configuration (``refragkit.compose``).
        folder: the run folder; made if missing. With ``resume`` that of the earlier run, where there is one.
        command: the command line, for the summary.
        sweep: folder of the sweep that the run is a job of.

    Returns:
        The summary, ``status`` "finished", "failed" (``error`` says why) or "interrupted".
    """
    from omegaconf import OmegaConf

    from refragkit.config import flatten, instantiate, validate
    from refragkit.console import close_logging, console, print_config, print_error, setup_logging
    from refragkit.summary import Summary, git_commit, peak_rss_bytes, reset_peak_rss
    from refragkit.training.resume import config_hash, earlier_run, lock_run

    folder = folder.absolute()
    earlier: EarlierRun | None = None
    try:
        if cfg.resume is not None:
            validate(cfg)
            earlier = earlier_run(cfg)
        if earlier is not None and earlier.finished:
            console.print(f"{_shown(earlier.folder)} is finished, and not done again", highlight=False)
            return Summary.read(earlier.folder / "summary.json")
        if earlier is not None:
            folder = earlier.folder
        elif (folder / "summary.json").exists():
            raise ConfigError(
                f"{_shown(folder)} holds an earlier run; choose another folder (hydra.run.dir=...), or go on with it"
                f" (resume={_shown(folder)})"
            )
        folder.mkdir(parents=True, exist_ok=True)
        lock = lock_run(folder)
    except RefragError as error:
        print_error(str(error))
        return Summary(status="failed", error=str(error))
    setup_logging(folder / "train.log")
    reset_peak_rss()
    started = time.perf_counter()
    choices = cfg.choices
    summary = Summary(
        task=str(choices.task),
        model=str(choices.model),
        method=str(choices.method),
        retriever=str(choices.retriever),
        seed=cfg.seed if isinstance(cfg.seed, int) else 0,
        git_commit=git_commit(),
        command=command,
        config_hash=config_hash(cfg),
        folder=str(folder),
    )
    before = 0.0
    if earlier is not None:
        before = float(earlier.summary.get("wall_seconds") or 0)
        summary.resumed = int(earlier.summary.get("resumed") or 0) + 1
        summary.mlflow_run_id = earlier.summary.get("mlflow_run_id")
        summary.metrics = dict(earlier.summary.get("metrics") or {})
        summary.artifacts = dict(earlier.summary.get("artifacts") or {})
    summary.write(folder / "summary.json")
    tracking: Tracking | None = None
    try:
        validate(cfg)
        _write_config(OmegaConf.to_yaml(cfg, resolve=True), folder / "config.yaml")
        if choices.task == "train":  # elsewhere what was asked for should not drown in it
            print_config(cfg)
        log.info("run folder: %s", _shown(folder))
        tracking = instantiate(cfg, "tracking", outputs=Path(cfg.paths.outputs).absolute())
        name = _run_name(cfg, folder)
        summary.mlflow_run_id = tracking.start(
            f"{name} (dry run)" if cfg.dry_run else name,
            params=flatten(cfg),
            tags={
                "command": command,
                "mlflow.source.name": command,
                "mlflow.source.type": "LOCAL",
                "mlflow.source.git.commit": summary.git_commit or "",
            },
            run_id=summary.mlflow_run_id,
            sweep=sweep,
        )
        tracking.log_artifact(folder / "config.yaml")
        run = Run(cfg, folder, tracking, summary, None if earlier is None else earlier.checkpoint)
        instantiate(cfg, "task", run=run)
        summary.status = "finished"
    except RefragError as error:
        log.debug("failed", exc_info=True)
        summary.status, summary.error = "failed", str(error)
        print_error(str(error))
    except (KeyboardInterrupt, SystemExit):  # Lightning turns the first into the second
        log.debug("interrupted", exc_info=True)
        summary.status, summary.error = "interrupted", "interrupted by Ctrl-C or SIGTERM"
        print_error(f"interrupted; what was saved is in {_shown(folder)}")
    except Exception as error:
        log.debug("failed", exc_info=True)
        summary.status, summary.error = "failed", f"{type(error).__name__}: {error}"
        print_error(f"{summary.error}\nThe traceback is in {_shown(folder / 'train.log')}")
    finally:
        summary.wall_seconds = before + time.perf_counter() - started
        summary.peak_rss_bytes = peak_rss_bytes()
        summary.write(folder / "summary.json")
        if tracking is not None:
            try:
                tracking.log_artifact(folder / "summary.json")
                tracking.log_artifact(folder / "train.log")
                tracking.end(summary.status)
            except Exception as error:
                log.debug("tracking", exc_info=True)
                print_error(f"the run could not be closed in the tracking store: {error}")
    if summary.status == "finished":
        log.info("finished in %.0f s: %s", summary.wall_seconds, _shown(folder / "summary.json"))
    close_logging()
    lock.release()
    return summary


def _run_name(cfg: DictConfig, folder: Path) -> str:
    """What tells a run from its neighbours in the tracking store's list."""
    choices = cfg.choices
    convert = cfg.get("convert")
    if choices.task == "evaluate":  # what was evaluated, and not a method or a model that had no part in it
        hops = cfg.retriever.get("max_hops")
        model = [choices.model] if cfg.evaluate == "rag" else []
        searches = [] if hops is None else [f"{hops}-hop"]
        parts = ["evaluate", cfg.evaluate, *model, choices.retriever, *searches]
    elif convert and "to" in convert:
        verb = "distill" if choices.method == "distill" else "convert"
        parts = [verb, Path(str(cfg.model.get("init") or choices.model)).name, "to", convert.to]
    elif choices.task == "train":
        parts = [choices.method, choices.model, choices.retriever]
    else:
        parts = [choices.task]
    return f"{'-'.join(map(str, parts))} {folder.name}"


def _write_config(text: str, path: Path) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def _shown(path: Path) -> str:
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def _job(cfg: DictConfig) -> float | None:
    """What Hydra calls for each job."""
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    from refragkit.config import with_choices
    from refragkit.sweep import note_job

    hydra = HydraConfig.get()
    cfg = with_choices(cfg, hydra.runtime.choices)
    command = shlex.join([*_program(), *hydra.overrides.task])
    if hydra.mode == RunMode.MULTIRUN:
        print(f"\njob {hydra.job.num}: {' '.join(hydra.overrides.task)}", flush=True)
    asked_for = [override for override in hydra.overrides.task if not override.startswith("resume=")]
    folder = Path(hydra.runtime.output_dir)
    if cfg.resume not in (None, "auto") and not asked_for:
        cfg = _stored(cfg)
    sweep = folder.parent if hydra.mode == RunMode.MULTIRUN else None
    summary = run_experiment(cfg, folder, command, sweep)
    if sweep is not None:
        note_job(sweep, hydra.job.num, Path(summary.folder or folder), hydra.overrides.task)
    if folder.exists() and not any(folder.iterdir()):  # Hydra makes one, and a resumed run has its own
        folder.rmdir()
    if summary.status != "finished":
        code = 130 if summary.status == "interrupted" else 1
        if hydra.mode != RunMode.MULTIRUN or code == 130:  # a failed job must not end the others
            sys.exit(code)
    return summary.metrics.get("val/f1")


def _stored(cfg: DictConfig) -> DictConfig:
    """The configuration of the run that ``resume=DIR`` alone names; what was given where there is none."""
    from omegaconf import open_dict

    from refragkit.console import print_error
    from refragkit.training.resume import stored_config

    folder = Path(str(cfg.resume)).expanduser()
    if not (folder / "config.yaml").exists():
        return cfg  # run_experiment says what is wrong with it
    try:
        stored = stored_config(folder)
    except ConfigError as error:
        print_error(str(error))
        sys.exit(1)
    with open_dict(stored):
        stored.resume = cfg.resume
    return stored


def _program() -> list[str]:
    name = Path(sys.argv[0]).name
    return ["python", name] if name.endswith(".py") else [name]


def _on_terminate(number: int, frame: Any) -> None:
    raise KeyboardInterrupt


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of ``run.py`` and of the console script; exits with 1 after an error, 130 when interrupted."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    # Two OpenMP runtimes (torch's and faiss's) in one process crash on macOS unless told to coexist.
    os.environ.setdefault("KMP_DUPLICATE_LIB_OK", "TRUE")
    from refragkit.console import print_error, print_help

    if "-h" in arguments or "--help" in arguments:
        print_help()
        return
    import hydra
    from hydra._internal.utils import get_args_parser

    from refragkit.config import check_overrides, conf_dir, one_message, register_resolvers
    from refragkit.sweep import unfinished
    from refragkit.text_overrides import quote_text

    register_resolvers()
    # argparse takes no flag after the first override; people write them anywhere.
    arguments.sort(key=lambda argument: argument not in ("-m", "--multirun"))
    arguments = quote_text(arguments)
    try:
        check_overrides(get_args_parser().parse_known_args(arguments)[0].overrides)
    except ConfigError as error:
        print_error(str(error))
        sys.exit(1)
    sys.argv = [sys.argv[0], *arguments]
    unfinished.clear()
    signal.signal(signal.SIGTERM, _on_terminate)
    os.environ["HYDRA_FULL_ERROR"] = "1"  # hand errors over as they are, to be shown like all others
    try:
        hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name="config")(_job)()
    except Exception as error:
        print_error(one_message(error))
        sys.exit(1)
    if unfinished:
        print_error("\n".join(["in this sweep failed:", *unfinished]))
        sys.exit(1)
