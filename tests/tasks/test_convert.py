"""``task=convert`` from the command line's side, on a tiny random transformer."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from refragkit.config import compose
from refragkit.data.tokenizer import Tokenizer
from refragkit.experiment import _run_name
from refragkit.models.build import transformer
from refragkit.models.checkpoint import load_model, save_model

Execute = Callable[..., Any]
IDS = torch.tensor([[5, 9, 70, 33, 12, 200, 41]])
SMALL = ("convert.calibration_tokens=1024", "convert.evaluation_tokens=1024")


def read_csv(file: Path) -> list[dict[str, str]]:
    with file.open() as lines:
        return list(csv.DictReader(lines))


@pytest.fixture(scope="module")
def words(tokenizer: Tokenizer) -> list[str]:
    generator = torch.Generator().manual_seed(0)
    return [
        " ".join(map(str, torch.randint(0, 999, (400,), generator=generator).tolist())) for _ in range(40)
    ]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory, words: list[str]) -> Path:
    file = tmp_path_factory.mktemp("text") / "text.jsonl"
    lines = (json.dumps({"id": f"d{i}", "title": f"T{i}", "text": t}) for i, t in enumerate(words))
    file.write_text("\n".join(lines) + "\n")
    return file


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Path:
    model = transformer(
        n_layers=4,
        vocab_size=tokenizer.vocab_size,
        d_model=48,
        n_heads=3,
        n_kv_heads=1,
        head_dim=16,
        d_ff=64,
        seed=1,
    )
    folder = save_model(model, tmp_path_factory.mktemp("source"), tokenizer)
    (folder / "README.md").write_text("---\nlicense: mit\n---\n# A model\n")
    return folder


@pytest.mark.parametrize("to", ["R", "M"])
def test_converts_calibrates_measures_and_saves(
    execute: Execute, source: Path, text: Path, to: str, tokenizer: Tokenizer
) -> None:
    overrides = (f"model.path={source}", "convert.layers=[1,3]", f"convert.to={to}", f"convert.text={text}")
    result = execute("task=convert", *overrides, *SMALL)
    assert result.summary["status"] == "finished", result.err
    model = load_model(result.folder / "model").eval()
    assert model.block_pattern == f"T{to}T{to}"
    teacher = load_model(source)
    for name in ("blocks.0.mixer.q_proj.weight", "blocks.1.mlp.up_proj.weight", "embed_tokens.weight"):
        assert torch.equal(model.state_dict()[name], teacher.state_dict()[name])
    assert Tokenizer.load(result.folder / "model").fingerprint == tokenizer.fingerprint
    metrics = result.summary["metrics"]
    for name in ("perplexity/held-out_text", "induction_perplexity", "recall", "state_bytes/16384"):
        assert f"convert/source/{name}" in metrics and f"convert/converted/{name}" in metrics
    assert metrics["convert/converted/state_bytes/16384"] < metrics["convert/source/state_bytes/16384"]
    rows = read_csv(result.folder / "conversion.csv")
    assert rows[0]["measure"] == "perplexity/held-out text" and float(rows[0]["converted / source"]) > 0
    assert set(result.summary["artifacts"]) == {"measures", "conversion_plot", "model"}
    card = (result.folder / "model" / "MODEL_CARD.md").read_text()
    for part in (
        "licence: mit",
        "converted blocks (from 0): 1, 3",
        "lsq on 1,024 tokens",
        "source model.safetensors",
    ):
        assert part in card
    # It is a model like any other
    again = execute("task=export", f"model.path={result.folder}")
    with torch.no_grad():
        assert torch.equal(load_model(again.folder / "model")(IDS).logits, model(IDS).logits)
    shown = execute("task=generate", f"model.path={result.folder}", "prompt=Who?", "max_new_tokens=4")
    assert shown.summary["status"] == "finished", shown.err


def test_auto_scans_once_and_gives_the_same_blocks_again(execute: Execute, source: Path, text: Path) -> None:
    overrides = (
        f"model.path={source}",
        f"convert.text={text}",
        "convert.count=2",
        "convert.evaluation_tokens=0",
    )
    first = execute("task=convert", *overrides, "convert.calibration_tokens=1024")
    assert first.summary["status"] == "finished", first.err
    assert "conversion_plot" not in first.summary["artifacts"]
    rows = read_csv(first.folder / "sensitivity.csv")
    assert sorted(int(row["layer"]) for row in rows) == [0, 1, 2, 3]
    chosen = sorted(int(row["layer"]) for row in rows if row["choice"] == "chosen")
    pattern = load_model(first.folder / "model").block_pattern
    assert [i for i, kind in enumerate(pattern) if kind == "R"] == chosen and len(chosen) == 2
    assert (first.folder / "plots" / "sensitivity.png").read_bytes().startswith(b"\x89PNG")
    second = execute("task=convert", *overrides, "convert.calibration_tokens=1024")
    assert "from the cache" in second.out and "from the cache" not in first.out
    assert (second.folder / "sensitivity.csv").read_bytes() == (first.folder / "sensitivity.csv").read_bytes()
    a, b = (load_model(run.folder / "model").state_dict() for run in (first, second))
    assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize(
    ("overrides", "part"),
    [
        (["convert.layers=[9]"], "9 is not a block of this model; blocks are numbered 0 to 3"),
        (["convert.layers=[]"], "convert.layers is empty"),
        (["convert.layers=some"], "expected auto or block numbers such as [3,7], got 'some'"),
        (["convert.to=T"], "convert.to: expected one of R, M, got 'T'"),
        (["convert.calibration=best"], "convert.calibration: expected one of lsq, cal, none"),
        (["convert.calibration_tokens=0"], "convert.calibration_tokens: expected at least 1, got 0"),
        (["convert.count=two"], "convert.count: expected a whole number, got 'two'"),
        (["+convert.tokens=5"], "unknown key 'convert.tokens'"),
        (["convert.text=nowhere.txt"], "convert.text=nowhere.txt: expected a .txt, .md or .jsonl file"),
        (["model.path=null"], "task=convert needs a trained model"),
        (["adapter=lora"], "adapter=none"),
        (["hardware.compile=true"], "hardware.compile=true: converting listens in"),
        (["convert.text=null", "data=chat", "data.path={chat}"], "give convert.text=FILE_OR_FOLDER"),
    ],
)
def test_errors_say_what_to_change(
    execute: Execute, source: Path, text: Path, tmp_path: Path, overrides: list[str], part: str
) -> None:
    chat = tmp_path / "chat.jsonl"
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    lines = (
        json.dumps({"id": str(i), "messages": [{**t, "content": f"{t['content']}{i}"} for t in turns]})
        for i in range(20)
    )
    chat.write_text("\n".join(lines))
    result = execute(
        "task=convert",
        f"model.path={source}",
        "convert.layers=[1]",
        f"convert.text={text}",
        *(override.format(chat=chat) for override in overrides),
    )
    assert part in result.summary["error"]
    assert not (result.folder / "model").exists()


def test_passages_of_validation_questions_are_left_out(
    execute: Execute, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from refragkit.models.convert import text as text_module

    seen: list[str] = []
    split_text = text_module.split_text

    def spy(documents: Any) -> Any:
        documents = list(documents)
        seen.extend(d.key if isinstance(d, text_module.TokenPiece) else d.doc_id for d in documents)
        return split_text(documents)

    monkeypatch.setattr(text_module, "split_text", spy)
    result = execute(
        "task=convert",
        f"model.path={source}",
        "convert.layers=[1]",
        "convert.calibration_tokens=512",
        "convert.evaluation_tokens=0",
    )
    assert result.summary["status"] == "finished", result.err
    from refragkit.data.datamodule import MultiHopQA

    data = MultiHopQA()
    data.prepare()
    gold = {i for q in data.validation for i in q.supporting_ids}
    assert len(gold) > 100 and not gold & set(seen)
    questions = {key for key in seen if key.startswith("question ")}
    assert questions == {f"question {q.id}" for q in data.train}
    assert len(seen) - len(questions) == len(data.corpus or []) - len(gold)


@pytest.mark.parametrize(("method", "verb"), [("sft", "convert"), ("distill", "distill")])
def test_its_run_is_named_after_what_becomes_what(method: str, verb: str) -> None:
    overrides = ["task=convert", f"method={method}", "model.init=models/qwen", "convert.to=R"]
    cfg = compose(overrides)
    assert _run_name(cfg, Path("outputs/7-run")) == f"{verb}-qwen-to-R 7-run"
    OmegaConf.update(cfg, "convert", None)
    assert _run_name(cfg, Path("outputs/7-run")) == "convert 7-run"  # what is wrong with it is said later
