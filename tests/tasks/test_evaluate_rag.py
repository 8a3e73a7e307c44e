"""``task=evaluate evaluate=rag`` as a run: scores, intervals, controls, prompts, costs, files, tracking, errors."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from refragkit.adapters.lora import LoRA
from refragkit.adapters.peft_format import save_adapter
from refragkit.config import compose
from refragkit.data.tokenizer import Tokenizer
from refragkit.errors import ConfigError, DataError
from refragkit.experiment import run_experiment
from refragkit.generation.engine import GenerationConfig, generate_with_state
from refragkit.methods.episodes import EpisodeBuilder
from refragkit.models.checkpoint import load_model
from refragkit.retrievers.bm25 import bm25
from refragkit.rewards.answer_f1 import AnswerF1
from refragkit.tasks.rag.answering import _batches, answer_all
from refragkit.tasks.rag.measuring import evaluate_rag
from refragkit.tasks.rag.prompts import build_prompt, prompt_text, shuffled
from refragkit.tasks.rag.settings import Settings, check_settings
from refragkit.tasks.rag.tables import score, sweep_rows, sweep_table
from refragkit.types import Document, Question
from tests.tasks.conftest import Result

Execute = Callable[..., Result]

DOCUMENTS = [
    ("film_a", "Silent Harbour", "Silent Harbour is a 1961 drama film directed by Marta Lindqvist."),
    ("film_b", "The Glass Orchard", "The Glass Orchard is a comedy film directed by Paul Oduya."),
    ("dir_a", "Marta Lindqvist", "Marta Lindqvist was a film maker born in Sweden."),
    ("dir_b", "Paul Oduya", "Paul Oduya is a stage and film director from Kenya."),
    ("sweden", "Sweden", "Sweden is a country in northern Europe."),
    ("tea", "Oolong", "Oolong is a tea grown on mountain slopes."),
    ("moss", "Sphagnum", "Sphagnum mosses store water and build peat."),
]
# id, question, answer, supporting_ids, dataset
QUESTIONS = [
    (
        "q1",
        "In which country was the director of Silent Harbour born?",
        "Sweden",
        ["film_a", "dir_a"],
        "films",
    ),
    ("q2", "Which country is the director of The Glass Orchard from?", "Kenya", ["film_b", "dir_b"], "films"),
    ("q3", "What stores water?", "moss", ["moss"], "plants"),
    ("q4", "Is there an answer?", "no", [], "plants"),
    ("t1", "Where is oolong grown?", "slopes", ["tea"], "plants"),
    ("t2", "Where is Sweden?", "Europe", ["sweden"], "plants"),
]


def _write(file: Path, rows: Sequence[dict[str, object]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def _data(folder: Path, answers: dict[str, str] | None = None) -> Path:
    folder.mkdir()
    _write(folder / "corpus.jsonl", [{"id": i, "title": t, "text": x} for i, t, x in DOCUMENTS])
    rows: list[dict[str, object]] = [
        {
            "id": i,
            "question": q,
            "answers": [(answers or {}).get(i, a)],
            "supporting_ids": s,
            "hops": len(s),
            "dataset": d,
        }
        for i, q, a, s, d in QUESTIONS
    ]
    _write(folder / "train.jsonl", rows[4:])
    _write(folder / "validation.jsonl", rows[:4])
    return folder


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return _data(tmp_path / "data")


def _common(model: Path, data: Path, *more: str) -> list[str]:
    changed = {o.split("=")[0] for o in more}
    given = [
        "task=evaluate",
        "evaluate=rag",
        f"model.path={model}",
        f"data.path={data}",
        "retriever=bm25",
        "rag.max_new_tokens=6",
        "rag.timed_questions=1",
        "rag.bootstrap_samples=200",
        "hardware.precision=32-true",
    ]
    return [o for o in given if o.split("=")[0] not in changed] + list(more)


def _questions(*ids: str) -> list[Question]:
    return [
        Question(i, q, (a,), tuple(s), len(s), metadata={"dataset": d})
        for i, q, a, s, d in QUESTIONS
        if not ids or i in ids
    ]


def _corpus() -> list[Document]:
    return [Document(*row) for row in DOCUMENTS]


# --- scores -----------------------------------------------------------------------------------------------


def test_scores_by_group_files_and_metrics(
    execute: Execute, run_folder: Path, tmp_path: Path, data: Path
) -> None:
    # Gold answers made of what the model really says: one right, one right in part, two wrong.
    hops = ["retriever.max_hops=2", "retriever.top_k_per_hop=1"]
    said = {s["id"]: s["completion"] for s in execute(*_common(run_folder, data, *hops)).samples}
    assert all(any(c.isalnum() for c in said[i]) for i in ("q1", "q2")), said
    answers = {"q1": said["q1"].upper() + " !", "q2": said["q2"] + " and the further words"}
    own = _data(tmp_path / "own", answers)
    result = execute(*_common(run_folder, own, *hops))
    assert result.summary["status"] == "finished", result.err

    from torchmetrics.functional.text import squad

    rows = {s["id"]: s for s in result.samples}
    for identifier, row in rows.items():
        if row["answers"][0] == "no":  # HotpotQA scores yes and no as a whole, SQuAD by the token
            assert row["f1"] == row["em"] == 0
            continue
        target = {"id": identifier, "answers": {"text": row["answers"], "answer_start": [0]}}
        theirs = squad([{"id": identifier, "prediction_text": row["completion"]}], [target])
        assert row["em"] == pytest.approx(float(theirs["exact_match"]) / 100)
        assert row["f1"] == pytest.approx(float(theirs["f1"]) / 100)
    assert rows["q1"]["em"] == 1.0 and 0 < rows["q2"]["f1"] < 1
    metrics = result.summary["metrics"]
    assert metrics["rag/em"] == 0.25 and metrics["rag/films/em"] == 0.5 and metrics["rag/2_hops/em"] == 0.5
    assert metrics["rag/f1"] == pytest.approx((1 + rows["q2"]["f1"]) / 4)
    for group in ("", "films/", "plants/", "1_hops/", "2_hops/"):
        for key in ("em", "f1"):
            low, high = metrics[f"rag/{group}{key}_low"], metrics[f"rag/{group}{key}_high"]
            assert 0 <= low <= metrics[f"rag/{group}{key}"] <= high <= 1
    assert metrics["rag/em_low"] < 0.25 < metrics["rag/em_high"]
    # q4 has no supporting passage and counts in no recall.
    assert metrics["rag/films/support_recall_hop_1"] == 0.5
    assert metrics["rag/films/support_recall"] == metrics["rag/films/support_recall_hop_2"] == 1.0
    assert metrics["rag/support_recall"] == 1.0 and rows["q4"]["support_recall"] is None
    assert metrics["rag/questions"] == 4.0 and metrics["rag/reward_total"] > 0
    assert result.summary["artifacts"] == {
        "rag": "rag.csv",
        "samples": "samples.jsonl",
        "prompt": "prompt.txt",
        "rag_plot": "plots/rag.png",
    }
    with (result.folder / "rag.csv").open(encoding="utf-8") as file:
        table = {row["group"]: row for row in csv.DictReader(file)}
    assert list(table) == ["all", "films", "plants", "1 hops", "2 hops"]
    first = table["all"]
    assert (first["retriever"], first["planner"], first["max_hops"]) == ("bm25", "expand", "2.0")
    assert (result.folder / "plots" / "rag.png").read_bytes().startswith(b"\x89PNG")
    prompt = (result.folder / "prompt.txt").read_text(encoding="utf-8")
    assert prompt.startswith("<|user|>In which country") and prompt.endswith("<|assistant|>\n")
    assert "<|doc|>Silent Harbour" in prompt
    assert "films" in result.out and "support recall" in result.out


def test_questions_without_annotation_have_no_recall(
    run_folder: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    retriever = bm25(max_hops=1, cache_dir=tmp_path).open_index(_corpus())
    evaluation = evaluate_rag(
        load_model(run_folder / "model"),
        tokenizer,
        retriever,
        _questions("q4"),
        AnswerF1(),
        Settings(max_new_tokens=2, bootstrap_samples=10),
    )
    assert "support_recall" not in evaluation.rows[0] and evaluation.rows[0]["documents"] == 3
    assert score(evaluation.rows[0], "support_recall") == "-"
    assert score({"f1": 0.5, "f1_low": 0.25, "f1_high": 1.0}, "f1") == ".500 (.250-1.000)"


# --- controls ---------------------------------------------------------------------------------------------


def test_controls(execute: Execute, run_folder: Path, data: Path) -> None:
    none = execute(*_common(run_folder, data, "retriever=none"))
    assert none.summary["status"] == "finished", none.err
    metrics = none.summary["metrics"]
    assert metrics["rag/documents"] == metrics["rag/hops"] == metrics["rag/support_recall"] == 0.0
    assert not any("hop_" in key for key in metrics)
    assert metrics["rag/first_token_seconds"] > 0
    gold = execute(*_common(run_folder, data, "retriever=gold", "retriever.top_k_per_hop=1"))
    metrics = gold.summary["metrics"]
    assert metrics["rag/support_recall"] == metrics["rag/support_recall_low"] == 1.0
    assert metrics["rag/support_recall_hop_1"] == pytest.approx((0.5 + 0.5 + 1) / 3)
    assert gold.samples[0]["prompt_tokens"] > none.samples[0]["prompt_tokens"]
    drawn = [
        execute(*_common(run_folder, data, "retriever=random", "retriever.max_hops=1")) for _ in range(2)
    ]
    found = [[d["doc_id"] for s in r.samples for d in s["hops"][0]["documents"]] for r in drawn]
    assert found[0] == found[1] and len(found[0]) == 4 * 3


def test_parts_of_the_questions(execute: Execute, run_folder: Path, data: Path) -> None:
    ids = {
        split: [
            row["id"]
            for row in execute(
                *_common(run_folder, data, "retriever=none", f"split={split}", "rag.max_new_tokens=1")
            ).samples
        ]
        for split in ("null", "train", "all")
    }
    assert ids == {
        "null": ["q1", "q2", "q3", "q4"],
        "train": ["t1", "t2"],
        "all": ["t1", "t2", "q1", "q2", "q3", "q4"],
    }


# --- prompts ----------------------------------------------------------------------------------------------


def test_the_prompt_is_that_of_training(tokenizer: Tokenizer, tmp_path: Path) -> None:
    retriever = bm25(max_hops=2, cache_dir=tmp_path).open_index(_corpus())
    questions = _questions()
    hops = retriever.retrieve(questions)
    for max_seq_len, max_document_tokens in ((6144, None), (6144, 20), (150, None)):
        builder = EpisodeBuilder(retriever, tokenizer, max_seq_len, 16, max_document_tokens)
        settings = Settings(max_seq_len=max_seq_len, max_document_tokens=max_document_tokens)
        for question, trail in zip(questions, hops, strict=True):
            assert build_prompt(question, trail, tokenizer, settings).input_ids == builder.prompt(
                question, trail
            )


def test_system_instruction_and_examples(tokenizer: Tokenizer, tmp_path: Path) -> None:
    retriever = bm25(max_hops=1, top_k_per_hop=1, cache_dir=tmp_path).open_index(_corpus())
    (question,) = _questions("q3")
    (trail,) = retriever.retrieve([question])
    settings = Settings(system="Be brief.", instruction="Say it.", examples=1)
    # A question is never its own example.
    for examples in (_questions("q3", "t1"), _questions("t1", "t2")):
        text = prompt_text(
            build_prompt(question, trail, tokenizer, settings, examples=examples).input_ids, tokenizer
        )
        assert text == (
            "<|system|>Be brief.<|end|><|user|>Where is oolong grown?<|end|><|assistant|>slopes<|end|>"
            "<|user|>What stores water?<|end|><|retrieval|><|doc|>Sphagnum\nSphagnum mosses store water and build"
            " peat.<|end|><|user|>Say it.<|end|><|assistant|>"
        )


def test_examples_come_from_the_training_side(execute: Execute, run_folder: Path, data: Path) -> None:
    result = execute(
        *_common(run_folder, data, "retriever=none", "rag.examples=1", "rag.system=Be, well, 'brief'.")
    )
    assert result.summary["status"] == "finished", result.err
    prompt = (result.folder / "prompt.txt").read_text(encoding="utf-8")
    assert prompt.startswith("<|system|>Be, well, 'brief'.<|end|><|user|>Where is ")
    assert prompt.count("<|assistant|>") == 2
    failed = execute(*_common(run_folder, data, "rag.examples=2"))
    assert "rag.examples=2: expected fewer than the 2 training questions" in failed.summary["error"]


def test_documents_are_shuffled_by_the_seed(tokenizer: Tokenizer, tmp_path: Path) -> None:
    retriever = bm25(max_hops=2, top_k_per_hop=3, cache_dir=tmp_path).open_index(_corpus())
    (question,) = _questions("q1")
    (trail,) = retriever.retrieve([question])
    ranked = [hit.doc_id for hop in trail for hit in hop.new_documents]
    orders = set()
    for seed in range(6):
        mixed = shuffled(trail, seed)
        order = [hit.doc_id for hop in mixed for hit in hop.new_documents]
        assert order == [hit.doc_id for hop in shuffled(trail, seed) for hit in hop.new_documents]
        assert sorted(order) == sorted(ranked)
        assert [len(hop.new_documents) for hop in mixed] == [len(hop.new_documents) for hop in trail]
        orders.add(tuple(order))
    assert len(orders) > 3
    settings = Settings(shuffle_documents=True)
    prompts = [build_prompt(question, trail, tokenizer, settings, seed).input_ids for seed in (0, 0, 1, 2)]
    plain = build_prompt(question, trail, tokenizer, Settings()).input_ids
    assert prompts[0] == prompts[1] and prompts[0] in (prompts[1], plain)
    assert len({tuple(p) for p in prompts}) > 1
    assert {len(p) for p in prompts} == {len(plain)}


def test_shuffled_runs_repeat_themselves(execute: Execute, run_folder: Path, data: Path) -> None:
    common = _common(run_folder, data, "rag.shuffle_documents=true")
    texts = [
        (r.folder / "prompt.txt").read_text()
        for r in (execute(*common), execute(*common), *(execute(*common, f"seed={n}") for n in (1, 2, 3)))
    ]
    assert texts[0] == texts[1]
    assert len(set(texts)) > 1


# --- cost -------------------------------------------------------------------------------------------------


def test_state_bytes_are_those_of_the_real_state(
    run_folder: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    model = load_model(run_folder / "model").eval()
    retriever = bm25(max_hops=2, top_k_per_hop=2, cache_dir=tmp_path).open_index(_corpus())
    questions = _questions("q1", "q3")
    settings = Settings(max_new_tokens=5, bootstrap_samples=10, timed_questions=2)
    evaluation = evaluate_rag(model, tokenizer, retriever, questions, AnswerF1(), settings)
    config = GenerationConfig(5, stop_ids=(tokenizer.end_id,))
    for question, trail, record in zip(
        questions, retriever.retrieve(questions), evaluation.records, strict=True
    ):
        prompt = build_prompt(question, trail, tokenizer, settings).input_ids
        generated = generate_with_state(model, [prompt], config, pad_id=tokenizer.pad_id)
        assert record["prompt_tokens"] == len(prompt)
        assert record["new_tokens"] == len(generated.completions[0][0].token_ids)
        assert record["state_bytes"] == generated.state.nbytes
    row = evaluation.rows[0]
    assert row["prompt_tokens_hop_1"] < row["prompt_tokens_hop_2"] == row["prompt_tokens"]
    assert row["state_bytes_hop_1"] < row["state_bytes_hop_2"] < row["state_bytes"]
    assert row["first_token_seconds_hop_1"] > 0 and row["first_token_seconds"] > 0
    assert row["hops"] > 1


def test_batches_hold_every_prompt_once_and_keep_to_their_size(
    run_folder: Path, tokenizer: Tokenizer
) -> None:
    lengths = [30, 5, 700, 12, 12, 29, 1]
    batches = _batches(lengths, 4, 70)
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    for batch in batches:
        assert len(batch) == 1 or len(batch) * (max(lengths[i] for i in batch) + 4) <= 70
    model = load_model(run_folder / "model").eval()
    prompts = [tokenizer.encode("Who wrote it? " * n) for n in (1, 9, 3, 2)] + [[]]
    one, many = (
        answer_all(model, tokenizer, prompts, Settings(max_new_tokens=8, batch_tokens=n))
        for n in (100_000, 60)
    )
    assert [a.token_ids for a in one] == [a.token_ids for a in many]
    assert one[-1].text == "" and len({a.text for a in one}) > 2


def test_long_prompts_are_read_in_pieces(run_folder: Path, tokenizer: Tokenizer) -> None:
    model = load_model(run_folder / "model").eval()
    prompts = [tokenizer.encode("Who wrote it? " * n) for n in (90, 70, 9, 1)]
    assert len(prompts[1]) > 3 * 64
    whole = answer_all(model, tokenizer, prompts, Settings(max_new_tokens=4))
    read: list[int] = []
    run = model._run

    def counted(input_ids, *rest):  # type: ignore[no-untyped-def]
        read.append(input_ids.numel())
        return run(input_ids, *rest)

    model._run = counted  # type: ignore[method-assign]
    pieces = answer_all(model, tokenizer, prompts, Settings(max_new_tokens=4, batch_tokens=64))
    assert [a.token_ids for a in pieces] == [a.token_ids for a in whole]
    assert max(read) == 64 and sum(read) >= sum(map(len, prompts))


def test_questions_that_do_not_fit_count_as_wrong(execute: Execute, run_folder: Path, data: Path) -> None:
    result = execute(*_common(run_folder, data, "rag.max_seq_len=36", "retriever.max_hops=1"))
    assert result.summary["status"] == "finished", result.err
    ended = {s["id"]: (s["ended_by"], s["prompt_tokens"]) for s in result.samples}
    assert ended["q1"] == ("too_long", 0) and ended["q3"][1] > 0
    metrics = result.summary["metrics"]
    assert 0 < metrics["rag/too_long"] < 1 and metrics["rag/left_out_documents"] > 0
    assert "questions don't fit into rag.max_seq_len=36" in result.out


# --- the run ----------------------------------------------------------------------------------------------


def test_an_adapter_is_put_on(execute: Execute, run_folder: Path, data: Path, tmp_path: Path) -> None:
    import torch

    model = load_model(run_folder / "model")
    LoRA(rank=4, alpha=64, blocks="all").apply(model, seed=1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(generator=torch.Generator().manual_seed(0))
    save_adapter(model, tmp_path / "adapter")
    plain, adapted = (
        execute(*_common(run_folder, data, f"adapter_path={path}")) for path in ("null", tmp_path / "adapter")
    )
    assert adapted.summary["status"] == "finished", adapted.err
    assert adapted.summary["total_parameters"] > plain.summary["total_parameters"]
    assert [s["completion"] for s in adapted.samples] != [s["completion"] for s in plain.samples]


def test_tracking(run_folder: Path, data: Path, tmp_path: Path) -> None:
    import mlflow
    from mlflow import MlflowClient

    outputs = tmp_path / "outputs"
    cfg = compose([*_common(run_folder, data, "retriever=gold"), f"paths.outputs={outputs}"])
    summary = run_experiment(cfg, tmp_path / "run")
    assert summary.status == "finished", summary.error
    client = MlflowClient(tracking_uri=f"sqlite:///{outputs / 'mlflow.db'}")
    run = client.get_run(str(summary.mlflow_run_id))
    assert run.info.run_name == "evaluate-rag-hybrid-gold run"
    assert run.data.metrics["rag/support_recall"] == 1.0
    assert run.data.params["rag.max_new_tokens"] == "6"
    files = {f.path for f in client.list_artifacts(run.info.run_id)}
    assert {"rag.csv", "samples.jsonl", "samples.json", "prompt.txt", "plots", "summary.json"} <= files
    table = client.load_table(run.info.experiment_id, "samples.json", [run.info.run_id])
    assert table["id"].tolist() == ["q1", "q2", "q3", "q4"] and table["supporting"][2] == "Sphagnum"
    assert {t.value for i in run.inputs.dataset_inputs for t in i.tags} == {"evaluation"}
    mlflow.set_tracking_uri(f"sqlite:///{outputs / 'mlflow.db'}")
    traces = mlflow.search_traces(run_id=run.info.run_id, return_type="list")
    assert len(traces) == 4
    names = {tuple(sorted(span.name for span in trace.data.spans)) for trace in traces}
    assert ("answer", "episode", "hop 1") in names


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["rag.max_new_tokens=many"], ["rag.max_new_tokens: expected a whole number, got 'many'"]),
        (["rag.max_new_tokens=0"], ["rag.max_new_tokens: expected at least 1, got 0"]),
        (["rag.max_new_tokens=true"], ["rag.max_new_tokens: expected a whole number, got True"]),
        (["rag.max_seq_len=6"], ["rag.max_new_tokens=6 leaves no room", "rag.max_seq_len=6"]),
        (["rag.order=backwards"], ["rag.order: expected one of question_first", "'backwards'"]),
        (
            ["rag.max_document_tokens=0", "rag.batch_tokens=0"],
            ["rag.max_document_tokens", "rag.batch_tokens"],
        ),
        (["rag.bootstrap_samples=0"], ["rag.bootstrap_samples: expected at least 1, got 0"]),
        (["+rag.max_new_token=3"], ["unknown key 'rag.max_new_token'", "did you mean 'rag.max_new_tokens'"]),
        (["~rag.order"], ["rag.order: missing key"]),
        (["rag=3"], ["rag: expected a mapping, got 3"]),
        (["model.path=null"], ["task=evaluate needs a trained model"]),
        (["model.path=/nowhere"], ["model.path", "/nowhere does not exist"]),
        (["adapter=lora"], ["adapter=lora puts a new adapter", "adapter_path=DIR"]),
        (["adapter_path=/nowhere"], ["adapter_path", "does not exist"]),
        (["dry_run=true"], ["dry_run=true is for task=train"]),
        (["evaluate=retrieval", "adapter_path=x"], ["evaluate=retrieval uses no model"]),
        (["data.path=/nowhere"], ["data.path=/nowhere", "does not exist"]),
    ],
)
def test_errors_say_what_to_change(
    execute: Execute, run_folder: Path, data: Path, overrides: list[str], parts: list[str]
) -> None:
    try:
        result = execute(*_common(run_folder, data, *overrides))
    except ConfigError as error:  # refused before the run
        message = str(error)
    else:
        assert result.summary["status"] == "failed"
        message = result.summary["error"]
        assert result.err.count("error:") == 1 and "Traceback" not in result.err
    for part in parts:
        assert part in message


def test_a_part_without_questions_is_refused(
    execute: Execute, run_folder: Path, data: Path, tokenizer: Tokenizer
) -> None:
    (data / "validation.jsonl").write_text("")
    result = execute(*_common(run_folder, data))
    assert result.summary["status"] == "failed"
    assert "validation.jsonl" in result.summary["error"]
    with pytest.raises(DataError, match="there are no questions"):
        evaluate_rag(load_model(run_folder / "model"), tokenizer, None, [], AnswerF1(), Settings())


def test_conversations_have_no_answers_to_score(execute: Execute, run_folder: Path, tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [
        {
            "id": str(i),
            "messages": [{"role": "user", "content": f"a {i}"}, {"role": "assistant", "content": "b"}],
        }
        for i in range(9)
    ]
    _write(tmp_path / "chat.jsonl", rows)
    more = ["data=chat", "retriever=none"]
    result = execute(*_common(run_folder, tmp_path / "chat.jsonl", *more))
    assert "evaluate=rag needs questions with answers" in result.summary["error"]


def test_the_defaults_are_those_of_the_configuration() -> None:
    assert check_settings(compose(["task=evaluate"]).rag) == Settings()


@pytest.mark.slow
def test_a_sweep_ends_with_one_table(run_folder: Path, data: Path, tmp_path: Path) -> None:
    command = [sys.executable, str(Path(__file__).parents[2] / "run.py"), "-m", *_common(run_folder, data)]
    more = [
        "retriever=none,bm25,gold",
        "tracking=none",
        f"paths.outputs={tmp_path}",
        f"hydra.sweep.dir={tmp_path}/s",
    ]
    command = [o for o in command if not o.startswith("retriever=")] + more
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = sweep_rows(tmp_path / "s")
    assert [row["retriever"] for row in rows] == ["none", "bm25", "gold"]
    last = done.stdout[done.stdout.rindex("this sweep so far") :]
    for part in ("no documents", "bm25, expand, 3 x 3 documents", "gold, repeat", "1.000 (1.000-1.000)"):
        assert part in last
    with (tmp_path / "s" / "rag.csv").open(encoding="utf-8") as file:
        assert len(list(csv.DictReader(file))) == 3
    assert sweep_table(rows).row_count == 3
