"""The recipes of ``conf/experiment``: they compose, and the command line still has the last word."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from refragkit.config import compose, conf_dir, group_options, instantiate, validate
from refragkit.console import print_help
from refragkit.errors import ConfigError
from refragkit.experiment import main
from refragkit.models.convert.ready_made import LAYERS

RECIPES = sorted(group_options("experiment"))


def test_there_are_recipes_and_the_help_page_names_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert "smollm2_refrag" in RECIPES
    print_help()
    screen = capsys.readouterr().out
    for name in RECIPES:
        assert name in screen
        assert group_options("experiment")[name].split(":")[0] in screen


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_changes_only_what_is_there(name: str) -> None:
    cfg = compose([f"experiment={name}"])
    validate(cfg)
    assert cfg.choices.experiment == name
    assert cfg.get("experiment") is None  # all of it is at the root
    text = (conf_dir() / "experiment" / f"{name}.yaml").read_text(encoding="utf-8")
    assert text.startswith("# @package _global_\n")
    assert f"python run.py experiment={name}" in text


def test_smollm2_refrag_is_refrag_on_the_pretrained_hybrid() -> None:
    cfg = compose(["experiment=smollm2_refrag"])
    assert (cfg.choices.method, cfg.choices.model, cfg.model.size) == ("refrag", "hybrid", "smollm2")
    recipe = instantiate(cfg, "method")
    assert recipe.matrix_lr * recipe.init_lr_frac == pytest.approx(1e-4)
    assert recipe.embedding_lr == 0 and recipe.frozen_blocks == min(LAYERS)
    assert recipe.global_batch_size % cfg.hardware.micro_batch_size == 0
    assert cfg.retriever.max_hops == 3


def test_the_command_line_wins_over_a_recipe() -> None:
    recipe = ["experiment=smollm2_refrag"]
    cfg = compose([*recipe, "method=sft", "retriever=none", "method.epochs=5", "model.path=somewhere"])
    assert (cfg.choices.method, cfg.choices.retriever) == ("sft", "none")
    assert (cfg.method.epochs, cfg.method.max_document_tokens, cfg.model.path) == (5, 100, "somewhere")
    cfg = compose(["retriever.max_hops=2", "retriever=hybrid", *recipe])
    assert (cfg.choices.retriever, cfg.retriever.max_hops, cfg.retriever.top_k_per_hop) == ("hybrid", 2, 1)


def test_a_recipe_can_be_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["run.py"])
    main(["-m", f"experiment={','.join(RECIPES)}", "method.epochs=1,2", "model.size=tiny", "method=sft", "dry_run=true",
          "tracking=none", f"paths.outputs={tmp_path}", "data.vocab_size=512"])  # fmt: skip
    found = [path.read_text() for path in sorted(tmp_path.glob("sweeps/*/*/config.yaml"))]
    assert len(found) == 2 * len(RECIPES)
    for name in RECIPES:
        epochs = [
            n for n in (1, 2) for text in found if f"experiment: {name}" in text and f"epochs: {n}" in text
        ]
        assert epochs == [1, 2]


def test_no_recipe_is_the_default_and_cannot_be_named() -> None:
    with pytest.raises(ConfigError, match=r"'experiment' has no option 'null' \(options: .*smollm2_refrag"):
        compose(["experiment=null"])
