from __future__ import annotations

import typing
from pathlib import Path

import pytest
from omegaconf import OmegaConf, open_dict

from refragkit.config import (
    GROUPS,
    check_overrides,
    compose,
    conf_dir,
    flatten,
    group_options,
    instantiate,
    is_allowed,
    nearest,
    node_parameters,
    type_problem,
    validate,
)
from refragkit.errors import ConfigError

OPTIONS = [(group, option) for group in GROUPS for option in group_options(group)]


@pytest.mark.parametrize(("group", "option"), OPTIONS)
def test_every_option_composes_and_matches_its_signature(group: str, option: str) -> None:
    needs = {"data": ["data.path=somewhere"] if option == "chat" else []}
    cfg = compose([f"{group}={option}", *needs.get(group, [])])
    assert cfg.choices[group] == option


@pytest.mark.parametrize(("group", "option"), OPTIONS)
def test_every_option_has_a_description_and_a_command(group: str, option: str) -> None:
    lines = (conf_dir() / group / f"{option}.yaml").read_text(encoding="utf-8").splitlines()
    lines = [line for line in lines if not line.startswith("# @package")]
    assert lines[0].startswith("# ")
    assert "python run.py" in lines[1]
    assert len(group_options(group)[option]) > 10


def test_defaults_are_those_of_the_design() -> None:
    cfg = compose()
    assert dict(cfg.choices) == {
        "task": "train",
        "model": "hybrid",
        "adapter": "none",
        "data": "multihop_qa",
        "retriever": "dense",
        "reward": "refrag",
        "hardware": "cpu",
        "tracking": "mlflow",
        "method": "sft",
        "experiment": None,
    }


def test_seed_defaults_of_the_methods() -> None:
    sft = compose(["method=sft"]).method
    assert (sft.epochs, sft.global_batch_size, sft.grad_clip) == (1, 16, 1.0)
    refrag = compose(["method=refrag"]).method
    assert (refrag.max_hops, refrag.top_k_per_hop, refrag.max_steps, refrag.max_seq_len) == (3, 3, 500, 6144)
    assert (refrag.embedding_lr, refrag.unembedding_lr, refrag.matrix_lr) == (0.1, 0.002, 0.01)
    assert (refrag.init_lr_frac, refrag.weight_decay, refrag.schedule) == (0.01, 0.0, "linear")
    assert (refrag.eval_every, refrag.eval_batches) == (50, 20)
    lora = compose(["method=lora"])
    assert lora.choices.adapter == "lora"
    assert (lora.adapter.rank, lora.adapter.alpha, lora.method.lr, lora.method.epochs) == (32, 64, 2e-5, 3)
    assert (lora.method.max_seq_len, lora.method.warmup_steps, lora.method.schedule) == (256, 100, "cosine")


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["methud=sft"], ["methud", "did you mean 'method'"]),
        (["method=sfft"], ["method=sfft", "did you mean 'sft'", "refrag"]),
        (["method.max_stepz=3"], ["method.max_stepz", "did you mean 'method.max_steps'"]),
        (["sed=1"], ["did you mean 'seed'"]),
        (["method=[sft,refrag]"], ["expected the name of one option"]),
        (["method=null"], ["has no option"]),
        (["no equals sign"], ["is not an override"]),
        (["method.max_steps=[unclosed"], ["is not an override"]),
        (["~seed"], ["can't be removed"]),
        (["+method=refrag"], ["is always there"]),
    ],
)
def test_wrong_overrides_name_the_key_and_the_nearest(overrides: list[str], parts: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        check_overrides(overrides)
    for part in parts:
        assert part in str(error.value)


def test_all_problems_are_reported_at_once() -> None:
    with pytest.raises(ConfigError) as error:
        check_overrides(["model=hybird", "method.max_stepz=3", "data.pathh=x", "bogus"])
    message = str(error.value)
    assert len(message.splitlines()) == 4
    for part in ("'hybrid'", "'method.max_steps'", "'data.path'", "'bogus'"):
        assert part in message


def test_a_sweep_is_checked_in_every_choice() -> None:
    check_overrides(["method=sft,refrag", "model=mamba,hybrid", "method.max_steps=2"])
    with pytest.raises(ConfigError, match="refrog"):
        check_overrides(["method=sft,refrog"])


def test_a_key_added_by_force_is_still_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"method\.max_stepz: unknown key; did you mean 'method\.max_steps'"
    ):
        compose(["+method.max_stepz=3"])
    with pytest.raises(ConfigError, match="unknown key 'metod'; did you mean 'method'"):
        compose(["+metod=3"])


def test_a_removed_key_is_missing() -> None:
    with pytest.raises(ConfigError, match=r"method\.epochs: missing key"):
        compose(["~method.epochs"])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("method.max_steps=many", r"method\.max_steps: expected a whole number or null, got 'many'"),
        ("method.grad_clip=hard", r"method\.grad_clip: expected a number, got 'hard'"),
        ("method.schedule=cosin", r"method\.schedule: expected one of linear, cosine, constant, got 'cosin'"),
        ("seed=x", "seed: expected a whole number, got 'x'"),
        ("dry_run=1", "dry_run: expected true or false, got 1"),
        ("method=3", "has no option '3'"),
        ("data.path=[a]", r"data\.path: expected"),
        ("retriever.max_hops=two", r"retriever\.max_hops: expected a whole number or null, got 'two'"),
        ("retriever.batch_size=1.5", r"retriever\.batch_size: expected a whole number, got 1\.5"),
        ("retriever.planner=null", r"retriever\.planner: expected a string, got None"),
        ("paths.outputs=null", r"paths\.outputs: expected a folder, got None"),
        ("+paths.inputs=x", r"unknown key 'paths\.inputs'"),
    ],
)
def test_wrong_types_are_refused(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        compose([override])


@pytest.mark.parametrize(
    "target", ["os.system", "subprocess.run", "builtins.eval", "refragkit_evil.x", "torch.load"]
)
def test_targets_outside_the_allow_list_are_refused(target: str) -> None:
    assert not is_allowed(target)
    with pytest.raises(ConfigError, match=r"method\._target_.*not on the allow-list"):
        compose([f"method._target_={target}"])


def test_nested_targets_are_checked_too() -> None:
    cfg = compose()
    with open_dict(cfg):
        cfg.reward.weights.answer = {"_target_": "os.system"}
    with pytest.raises(ConfigError, match=r"reward\.weights\.answer\._target_: 'os\.system'"):
        validate(cfg)


def test_every_node_refers_to_facts_only() -> None:
    allowed = ("${paths.", "${seed}", "${hydra:", "${oc.env:", "${now:", "${run_id:}")
    for file in conf_dir().rglob("*.yaml"):
        text = file.read_text(encoding="utf-8")
        for position in (i for i in range(len(text)) if text.startswith("${", i)):
            assert text.startswith(allowed, position), f"{file}: {text[position : position + 40]}"


@pytest.mark.parametrize("key", ["lr", "grad_clip", "weight_decay", "matrix_lr", "temperature"])
def test_settings_that_are_not_numbers_are_refused(key: str) -> None:
    with pytest.raises(ConfigError, match=rf"method\.{key}: expected a finite number"):
        instantiate(compose(["method=refrag", f"method.{key}=nan"]), "method")


def test_a_path_in_any_script_means_itself() -> None:
    path = "/tmp/ünï cödé 日本/x"
    assert compose([f"data.path={path}"]).data.path == path


def test_instantiate_builds_plain_values(tmp_path: Path) -> None:
    cfg = compose(["method=refrag"])
    recipe = instantiate(cfg, "method")
    assert recipe.max_hops == 3
    assert type(instantiate(cfg, "adapter")).__name__ == "NoAdapter"


def test_compose_leaves_hydra_as_it_found_it() -> None:
    from hydra.core.global_hydra import GlobalHydra

    compose()
    assert not GlobalHydra.instance().is_initialized()


@pytest.mark.parametrize(
    ("value", "hint", "problem"),
    [
        (1, int, None),
        (True, int, "a whole number"),
        (1, float, None),
        (None, int | None, None),
        ("a", int | None, "a whole number or null"),
        ([1, 2], list[int], None),
        ([1, "a"], list[int], "a list of which each is a whole number"),
        ("ab", list[str], "a list"),
        ({"a": 1}, dict[str, int], None),
        (1, dict[str, int], "a mapping"),
        ("x", typing.Literal["x", "y"], None),
        ("z", typing.Literal["x", "y"], "one of x, y"),
        (object(), typing.Any, None),
    ],
)
def test_type_problem(value: object, hint: object, problem: str | None) -> None:
    assert type_problem(value, hint) == problem


def test_node_parameters_include_the_multi_hop_loop() -> None:
    keys = node_parameters("retriever", compose(["retriever=bm25"]).retriever._target_)
    assert {"planner", "max_hops", "top_k_per_hop"} <= set(keys)


def test_flatten_and_nearest() -> None:
    assert flatten(OmegaConf.create({"a": {"b": 1, "c": [1, 2]}, "d": None})) == {
        "a.b": 1,
        "a.c": "[1, 2]",
        "d": None,
    }
    assert nearest("refragg", ["refrag", "sft"]) == "refrag"
    assert nearest("zzz", ["refrag", "sft"]) is None
