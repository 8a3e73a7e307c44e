"""What a run shows: the help page, the configuration tree, log lines, and one readable error."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.logging import RichHandler
from rich.markup import escape
from rich.table import Table
from rich.tree import Tree

from refragkit.config import GROUPS, group_options

# Where nobody watches (a file, CI), lines are not folded at 80 columns.
_WIDTH = None if sys.stdout.isatty() else 160
console = Console(width=_WIDTH)
error_console = Console(stderr=True, width=_WIDTH)
log = logging.getLogger("refragkit")

_HELP_HEAD = """\
[bold]refragkit[/bold]: fine-tune recurrent and hybrid language models with retrieval and rewards

  python run.py method=refrag model=hybrid                one experiment
  python run.py -m method=sft,refrag model=mamba,hybrid   a sweep: one run each
  python run.py method=lora model=rwkv-qwen dry_run=true  sizes and steps, no training
  python run.py --cfg job method=refrag                   the composed configuration

[bold]group=option[/bold] chooses an option of a group, [bold]group.key=value[/bold] changes a value.
"""

_HELP_TAIL = """[bold]Also[/bold]
  seed=0              seed of initialisation, data order and sampling
  dry_run=false       build on the meta device, report and stop
  paths.outputs=DIR   for runs, caches and the MLflow store (default: ./outputs)
  hydra.run.dir=DIR   the folder of this run
  --hydra-help        Hydra's own options
"""


def print_help() -> None:
    """Print every group with its options, one line each."""
    from refragkit.config import conf_dir

    defaults = {
        next(iter(entry)).split()[-1]: next(iter(entry.values()))
        for entry in OmegaConf.to_container(OmegaConf.load(conf_dir() / "config.yaml"))["defaults"]  # type: ignore[index, call-overload]
        if isinstance(entry, dict)
    }
    console.print(_HELP_HEAD, highlight=False)
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column()
    for group in GROUPS:
        for index, (option, description) in enumerate(group_options(group).items()):
            star = "*" if defaults.get(group) == option else " "
            table.add_row(
                f"[bold]{group}[/bold]" if index == 0 else "", f"{star}{escape(option)}", escape(description)
            )
    console.print(table)
    console.print("(* = default)\n", highlight=False)
    console.print(_HELP_TAIL, highlight=False)


def print_config(cfg: DictConfig) -> None:
    """Print the composed configuration as a tree, a branch for each group with its chosen option."""
    tree = Tree("configuration", guide_style="dim")
    for key in map(str, cfg):
        if key == "choices":
            continue
        node = cfg[key]
        if isinstance(node, DictConfig):
            branch = tree.add(f"[bold]{key}[/bold]: {escape(str(cfg.choices.get(key) or ''))}".rstrip(": "))
            for name, value in OmegaConf.to_container(node, resolve=True).items():  # type: ignore[union-attr]
                if name != "_target_":
                    branch.add(f"{escape(str(name))}: {escape(_plain(value))}")
        else:
            tree.add(f"[bold]{key}[/bold]: {escape(_plain(node))}")
    console.print(tree, highlight=False)


def _plain(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def print_error(message: str) -> None:
    """Print one error for the user on standard error."""
    error_console.print(f"[bold red]error:[/bold red] {escape(message)}", highlight=False, soft_wrap=True)


def setup_logging(log_file: Path) -> None:
    """Send everything, warnings and tracebacks included, to ``log_file``, and refragkit's own lines to the screen."""
    root = logging.getLogger()
    for handler in list(root.handlers):  # an earlier job of the same sweep
        root.removeHandler(handler)
        handler.close()
    for handler in list(log.handlers):
        log.removeHandler(handler)
    to_file = logging.FileHandler(log_file, encoding="utf-8")
    to_file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root.addHandler(to_file)
    root.setLevel(logging.INFO)
    screen = RichHandler(
        console=console, show_path=False, show_level=False, log_time_format="%H:%M:%S", markup=False
    )
    screen.setLevel(logging.INFO)
    log.addHandler(screen)
    log.setLevel(logging.DEBUG)
    logging.captureWarnings(True)


def route_library_logs() -> None:
    """Send Lightning's own lines to the log file only; call it after Lightning is imported."""
    for noisy in (
        "lightning",
        "lightning.pytorch",
        "lightning.fabric",
        "lightning.pytorch.utilities.rank_zero",
    ):
        library = logging.getLogger(noisy)
        library.handlers.clear()
        library.propagate = True


def close_logging() -> None:
    """Close the run's log file."""
    for logger in (logging.getLogger(), log):
        for handler in list(logger.handlers):
            logger.removeHandler(handler)
            handler.close()


def is_terminal() -> bool:
    """Whether a person watches: progress bars are drawn only then, log lines always."""
    return sys.stdout.isatty()


# Characters that would move the cursor or worse; a model can write any.
_CONTROL = {code: "\ufffd" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}


def write_text(text: str) -> None:
    """Write text of a model to standard output at once; control characters are made harmless for a terminal."""
    sys.stdout.write(text.translate(_CONTROL) if is_terminal() else text)
    sys.stdout.flush()


@contextmanager
def progress_bar(what: str, steps: int) -> Iterator[Callable[[], None]]:
    """A bar where a person watches, gone when the block ends; yields what moves it on by a step."""
    from rich.progress import Progress

    if not is_terminal():
        yield lambda: None
        return
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task(what, total=steps)
        yield lambda: progress.advance(task)
