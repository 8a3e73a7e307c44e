from __future__ import annotations

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from refragkit.config import check_overrides, compose, instantiate, task_keys
from refragkit.errors import ConfigError
from refragkit.text_overrides import quote_text

TEXTS = [
    "Who wrote Hamlet, and when?",
    "Who's there? (me) = {x} [y]",
    '"Hamlet" was written by whom?',
    "'",
    "C:\\dir\\",
    "x\\\\\\'",
    "${seed} and \\${seed}",
    "two\nlines\tand a tab",
    "null",
    "12",
    "true",
    "",
    " spaces ",
    "[INST] hi [/INST]",
]


def _read(override: str) -> str:
    """The value as Hydra's grammar and OmegaConf's interpolation leave it."""
    (parsed,) = OverridesParser.create().parse_overrides(quote_text([override]))
    value: str = OmegaConf.create({"seed": 1, "text": parsed.value()}).text
    return value


@pytest.mark.parametrize("text", TEXTS)
def test_text_means_itself(text: str) -> None:
    assert _read(f"prompt={text}") == text


def test_text_reaches_the_task() -> None:
    cfg = compose(["task=generate", f"prompt={TEXTS[0]}", f"system={TEXTS[6]}", f"stop={TEXTS[3]}"])
    assert (cfg.prompt, cfg.system, cfg.stop) == (TEXTS[0], TEXTS[6], TEXTS[3])
    assert {key: task_keys(cfg)[key] for key in ("prompt", "system")} == {
        "prompt": TEXTS[0],
        "system": TEXTS[6],
    }


@settings(max_examples=100, deadline=None)
@given(st.text(alphabet="ab'\"\\,${}[]=: \n", max_size=12))
def test_any_text_survives_the_grammar_of_overrides(text: str) -> None:
    assert _read(f"system=<{text}>") == f"<{text}>"


def test_hydras_own_quotes_and_lists_still_work() -> None:
    assert quote_text(["prompt='a, b'"]) == ["prompt='a, b'"]
    assert quote_text(["""prompt="a","b" """.strip()]) == ["""prompt="a","b" """.strip()]
    assert compose(["task=generate", "stop=[a,'b, c']"]).stop == ["a", "b, c"]
    assert compose(["task=generate", "stop=Question: x, y"]).stop == "Question: x, y"
    assert quote_text(["method=sft,refrag", "seed=1", "-m"]) == ["method=sft,refrag", "seed=1", "-m"]


def test_root_keys_of_a_task_are_checked_by_their_own_name() -> None:
    with pytest.raises(ConfigError, match=r"^temperature: expected a number, got 'hot'$"):
        compose(["task=generate", "temperature=hot"])
    with pytest.raises(ConfigError, match="there is no key 'promt'; did you mean 'prompt'"):
        check_overrides(["task=generate", "promt=x"])
    with pytest.raises(ConfigError, match="there is no key 'prompt'"):
        compose(["prompt=x"])
    with pytest.raises(ConfigError, match="format: expected one of refragkit, hf, got 'onnx'"):
        compose(["task=export", "format=onnx"])


def test_root_keys_may_refer_to_facts() -> None:
    cfg = compose(["task=export", "export_dir=${paths.outputs}/x", "paths.outputs=/somewhere"])
    assert task_keys(cfg)["export_dir"] == "/somewhere/x"
    with pytest.raises(ConfigError, match="nothing"):
        compose(["task=export", "export_dir=${paths.nothing}/x"])


def test_tasks_get_their_root_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = {}

    def export(run: object, format: str, export_dir: str, adapter_path: str | None) -> None:
        seen.update(format=format, export_dir=export_dir, adapter_path=adapter_path)

    monkeypatch.setattr("refragkit.tasks.export.export", export)
    cfg = compose(["task=export", "export_dir=a", "format=hf"])
    instantiate(cfg, "task", run=None)
    assert seen == {"format": "hf", "export_dir": "a", "adapter_path": None}


@pytest.mark.parametrize(
    "text", ['title == "Banana"', 'doc_id in ["a", "b"]', "year > 1990 and topic == 'tea, green'"]
)
def test_a_filter_means_itself(text: str) -> None:
    assert _read(f"retriever.filter={text}") == text


def test_a_filter_may_be_null_or_quoted_for_hydra() -> None:
    for override in ("retriever.filter=null", """retriever.filter='title == "x"'"""):
        assert quote_text([override]) == [override]
