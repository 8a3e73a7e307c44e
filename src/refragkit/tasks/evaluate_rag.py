"""``evaluate=rag``: how well a model answers, given what the retriever finds: EM, F1, support recall, and the cost."""

from __future__ import annotations

import logging
import math
import random
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

from refragkit.bootstrap import bootstrap_interval
from refragkit.config import nearest, type_problem
from refragkit.data.conversation import ORDERS, Rendered, conversation_from_hops, prepare_prompt
from refragkit.errors import ConfigError, DataError
from refragkit.rewards.relevance import support_recall
from refragkit.seeding import derive_seed
from refragkit.tasks.evaluate_retrieval import Row, as_metrics, question_groups, write_atomically, write_csv
from refragkit.types import Conversation, Hop, Message, Question

if TYPE_CHECKING:
    from rich.table import Table

    from refragkit.data.tokenizer import Tokenizer
    from refragkit.experiment import Run
    from refragkit.methods.answers import Answer
    from refragkit.models.base import SequenceModel
    from refragkit.retrievers.multi_hop import MultiHopRetriever
    from refragkit.rewards.base import Reward

log = logging.getLogger("refragkit")

#: What gets an interval, and its heading.
SCORES: Mapping[str, str] = {"f1": "F1", "em": "EM", "support_recall": "support recall"}
_TRACES = 16  # questions whose hops are logged as traces, as in training's evaluation
_SECONDS_BETWEEN_LINES = 20


@dataclass(frozen=True)
class Settings:
    """The keys of ``rag``.

    Attributes:
        max_new_tokens: tokens of an answer at most, the end token included.
        max_seq_len: tokens of prompt and answer together.
        max_document_tokens: tokens of one document; None for no limit of its own.
        order: where the question stands, one of ``refragkit.data.conversation.ORDERS``.
        shuffle_documents: whether a question's documents come in a random order.
        system: a system turn in front; none if empty.
        instruction: a user turn behind the documents; none if empty.
        examples: how many training questions stand in front with their answers, without documents.
        batch_tokens: tokens of a batch of questions, prompts, answers and padding together.
        timed_questions: how many are asked alone to time the first token.
        bootstrap_samples: resamples behind each interval.
    """

    max_new_tokens: int = 16
    max_seq_len: int = 6144
    max_document_tokens: int | None = None
    order: str = "question_first"
    shuffle_documents: bool = False
    system: str = ""
    instruction: str = ""
    examples: int = 0
    batch_tokens: int = 16384
    timed_questions: int = 4
    bootstrap_samples: int = 2000


def check_settings(values: Mapping[str, Any]) -> Settings:
    """The keys of ``rag`` with their types checked.

    Raises:
        ConfigError: an unknown or missing key, or a value that can't be.
    """
    hints = get_type_hints(Settings)
    problems = []
    for key in values:
        if key not in hints:
            near = nearest(str(key), hints)
            problems.append(f"unknown key 'rag.{key}'" + (f"; did you mean 'rag.{near}'?" if near else ""))
    for key, hint in hints.items():
        if key not in values:
            problems.append(f"rag.{key}: missing key")
        elif expected := type_problem(values[key], hint):
            problems.append(f"rag.{key}: expected {expected}, got {values[key]!r}")
    if problems:
        raise ConfigError("\n".join(problems))
    settings = Settings(**{str(key): value for key, value in values.items()})
    least_values = {"max_new_tokens": 1, "max_seq_len": 2, "max_document_tokens": 1, "batch_tokens": 1}
    least_values |= {"examples": 0, "timed_questions": 0, "bootstrap_samples": 1}
    for key, least in least_values.items():
        value = getattr(settings, key)
        if value is not None and value < least:
            problems.append(f"rag.{key}: expected at least {least}, got {value}")
    if settings.max_new_tokens >= settings.max_seq_len:
        problems.append(
            f"rag.max_new_tokens={settings.max_new_tokens} leaves no room for a question in rag.max_seq_len="
            f"{settings.max_seq_len}; change one of them"
        )
    if settings.order not in ORDERS:
        problems.append(f"rag.order: expected one of {', '.join(ORDERS)}, got {settings.order!r}")
    if problems:
        raise ConfigError("\n".join(problems))
    return settings


@dataclass(frozen=True, slots=True)
class RagEvaluation:
    """What was measured.

    Attributes:
        rows: one per group: ``all``, each ``metadata["dataset"]`` where there are several, each hop count
            (``2 hops``). Every row has ``group``, ``questions`` and means over its questions:

            - ``f1``, ``em`` and, where supporting passages are annotated, ``support_recall``, each with the ends of its
              95% bootstrap interval (``f1_low``, ``f1_high``); ``support_recall_hop_<n>`` after hop n;
            - ``reward_<part>`` of the run's reward;
            - ``hops``, ``documents``, and ``shortened_documents``, ``left_out_documents`` to fit;
            - ``prompt_tokens``, ``prompt_tokens_hop_<n>`` (of a prompt with the documents of the first n hops),
              ``new_tokens``, ``state_bytes`` after prompt and answer, ``state_bytes_hop_<n>`` after that prompt;
            - ``ended``: the share of answers that the model ended itself; ``empty``: of those without a word;
              ``too_long``: of questions that didn't fit, and got no answer;
            - ``retrieval_seconds``: a question's share of the batched searches.

            A question that stopped early keeps its last value in later hops. The row ``all`` also has
            ``first_token_seconds`` and ``first_token_seconds_hop_<n>``, the median over ``timed_questions`` that were
            asked one at a time, from prompt to first token, without retrieval; and ``generate_seconds`` and
            ``questions_per_second`` of the batched generation.
        records: one per question, as in ``samples.jsonl``.
        first_prompt: token ids of the first question's prompt.
    """

    rows: list[Row]
    records: list[dict[str, Any]]
    first_prompt: list[int]


def evaluate_rag(
    model: SequenceModel,
    tokenizer: Tokenizer,
    retriever: MultiHopRetriever | None,
    questions: Sequence[Question],
    reward: Reward,
    settings: Settings,
    *,
    seed: int = 0,
    examples: Sequence[Question] = (),
    precision: AbstractContextManager[Any] | None = None,
) -> RagEvaluation:
    """Retrieve for all questions in batches, answer them greedily in batches, and measure.

    Args:
        model: in eval mode, on its device.
        tokenizer: the model's.
        retriever: with its index open; None answers from the question alone.
        questions: at least one; support recall is measured on those with ``supporting_ids``.
        reward: scores the answers.
        settings: how to ask.
        seed: of shuffled documents and of the intervals.
        examples: questions that stand in front of each prompt with their answers, see `build_prompt`.
        precision: what the model computes under, such as autocast.

    Raises:
        DataError: no question.
    """
    from refragkit.methods.answers import episode, score_answers
    from refragkit.rewards.base import says_nothing

    if not questions:
        raise DataError("evaluate=rag: there are no questions; expected at least one in data.path")
    hops: list[tuple[Hop, ...]] = [()] * len(questions)
    if retriever is not None:
        retriever.warm_up()
        hops = retriever.retrieve(questions)
    last = max(map(len, hops))
    # The prompt with the documents of the first n hops, for n = 0 .. last; the last one is what is asked.
    prompts = [
        [
            build_prompt(question, trail[:n], tokenizer, settings, seed, examples)
            for n in range(min(1, len(trail)), len(trail) + 1)
        ]
        for question, trail in zip(questions, hops, strict=True)
    ]
    asked = [p[-1].input_ids for p in prompts]
    with precision or nullcontext():
        started = time.perf_counter()
        answers = answer_all(model, tokenizer, asked, settings)
        generate_seconds = time.perf_counter() - started
        timed = _first_token_seconds(model, tokenizer, questions, prompts, settings.timed_questions)
        fixed_bytes, bytes_per_token = _state_size(model)
    max_hops = 0 if retriever is None else retriever.max_hops
    episodes = [episode(q, h, a.text, max_hops) for q, h, a in zip(questions, hops, answers, strict=True)]
    _, records = score_answers(episodes, reward, step=0)

    measured: list[dict[str, float]] = []
    for question, record, e, prompt, answer in zip(
        questions, records, episodes, prompts, answers, strict=True
    ):
        lengths = [len(p) for p in prompt]
        read = [float(fixed_bytes + bytes_per_token * n) for n in lengths]
        ended = bool(answer.token_ids) and answer.token_ids[-1] == tokenizer.end_id
        recall = {}
        if e.supporting_ids:
            after = [support_recall(replace(e, hops=e.hops[:n])) for n in range(1, len(e.hops) + 1)]
            recall = {"support_recall": support_recall(e), **_by_hop("support_recall", after, last)}
        values = {
            "f1": record["f1"],
            "em": record["em"],
            **recall,
            **{f"reward_{name}": value for name, value in record["rewards"].items()},
            "hops": float(len(e.hops)),
            "documents": float(len(e.documents)),
            "shortened_documents": float(prompt[-1].truncated_documents),
            "left_out_documents": float(prompt[-1].left_out_documents),
            "prompt_tokens": float(lengths[-1]),
            **_by_hop("prompt_tokens", lengths, last),
            "new_tokens": float(len(answer.token_ids)),
            "state_bytes": float(fixed_bytes + bytes_per_token * (lengths[-1] + len(answer.token_ids))),
            **_by_hop("state_bytes", read, last),
            "ended": float(ended),
            "empty": float(says_nothing(answer.text)),
            "too_long": float(prompt[-1].dropped == "too_long"),
            "retrieval_seconds": sum(hop.latency_seconds for hop in e.hops),
        }
        measured.append(values)
        shown = ("prompt_tokens", "new_tokens", "state_bytes", "shortened_documents", "left_out_documents")
        record |= {
            "dataset": question.metadata.get("dataset"),
            "hops_needed": question.hops,
            "support_recall": values.get("support_recall"),
            **{key: int(values[key]) for key in shown},
            "ended_by": "too_long" if values["too_long"] else "end_token" if ended else "max_new_tokens",
        }
        del record["step"]
    rows = [
        _row(group, [measured[i] for i in members], settings.bootstrap_samples, seed)
        for group, members in question_groups(questions, by_hops=True).items()
    ]
    if timed:
        final = _median([seconds[-1] for seconds in timed])
        rows[0]["first_token_seconds"] = final
        for n in range(last):
            seconds_after = [seconds[min(n, len(seconds) - 1)] for seconds in timed]
            rows[0][f"first_token_seconds_hop_{n + 1}"] = _median(seconds_after)
    rows[0]["generate_seconds"] = generate_seconds
    rows[0]["questions_per_second"] = len(questions) / generate_seconds
    return RagEvaluation(rows, records, asked[0])


def build_prompt(
    question: Question,
    hops: Sequence[Hop],
    tokenizer: Tokenizer,
    settings: Settings,
    seed: int = 0,
    examples: Sequence[Question] = (),
) -> Rendered:
    """The prompt of a question with what was retrieved for it; with the default settings that of training.

    Args:
        question: what is asked.
        hops: what was retrieved.
        tokenizer: renders it.
        settings: see `Settings`.
        seed: of the order of documents, with the question's id.
        examples: the first ``settings.examples`` of these stand in front, each as a turn of the user and the gold
            answer; never the question itself.

    Returns:
        Token ids up to where the answer begins; none, and ``dropped``, where the question alone is too long.
    """
    if settings.shuffle_documents:
        hops = shuffled(hops, derive_seed(seed, "documents", question.id))
    asked = conversation_from_hops(question.question, hops, order=settings.order)
    messages = [Message("system", settings.system)] if settings.system else []
    for example in [e for e in examples if e.id != question.id][: settings.examples]:
        messages += [Message("user", example.question), Message("assistant", example.answers[0])]
    messages += asked.messages
    if settings.instruction:
        messages.append(Message("user", settings.instruction))
    return prepare_prompt(
        Conversation(question.id, tuple(messages)),
        tokenizer,
        settings.max_seq_len,
        settings.max_new_tokens,
        max_document_tokens=settings.max_document_tokens,
    )


def shuffled(hops: Sequence[Hop], seed: int) -> tuple[Hop, ...]:
    """The same documents in a random order over all hops; each hop keeps its number of them."""
    documents = [hit for hop in hops for hit in hop.new_documents]
    random.Random(seed).shuffle(documents)
    rest = iter(documents)
    return tuple(replace(hop, new_documents=tuple(next(rest) for _ in hop.new_documents)) for hop in hops)


def answer_all(
    model: SequenceModel, tokenizer: Tokenizer, prompts: Sequence[list[int]], settings: Settings
) -> list[Answer]:
    """Greedy answers in the order of the prompts; similar lengths share a batch of ``batch_tokens``."""
    from refragkit.methods.answers import Answer, generate_answers

    answers = [Answer([], [], "") for _ in prompts]
    batches = _batches([len(p) for p in prompts], settings.max_new_tokens, settings.batch_tokens)
    done, shown = 0, time.perf_counter()
    for batch in batches:
        found = generate_answers(model, tokenizer, [prompts[i] for i in batch], settings.max_new_tokens)
        for i, answer in zip(batch, found, strict=True):
            answers[i] = answer
        done += len(batch)
        if done < len(prompts) and time.perf_counter() - shown > _SECONDS_BETWEEN_LINES:
            shown = time.perf_counter()
            log.info("answered %d of %d questions", done, len(prompts))
    return answers


def _batches(lengths: Sequence[int], new_tokens: int, batch_tokens: int) -> list[list[int]]:
    """Positions of all prompts, the longest first, in batches of at most ``batch_tokens`` (one prompt at least)."""
    batches: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if batches and (len(batches[-1]) + 1) * (lengths[batches[-1][0]] + new_tokens) <= batch_tokens:
            batches[-1].append(i)
        else:
            batches.append([i])
    return batches


def _first_token_seconds(
    model: SequenceModel,
    tokenizer: Tokenizer,
    questions: Sequence[Question],
    prompts: Sequence[Sequence[Rendered]],
    n: int,
) -> list[list[float]]:
    """For n questions, asked alone: seconds from the prompt to the first token, for each of its prompts."""
    from refragkit.data.split import subset_positions
    from refragkit.methods.answers import generate_answers

    fitting = [i for i, p in enumerate(prompts) if p[-1].input_ids]
    chosen = subset_positions([questions[i].id for i in fitting], n) if n else []
    timed = []
    for position in chosen:
        seconds = []
        for prompt in prompts[fitting[position]]:
            started = time.perf_counter()
            generate_answers(model, tokenizer, [prompt.input_ids], 1)
            seconds.append(time.perf_counter() - started)
        timed.append(seconds)
    return timed


def _state_size(model: SequenceModel) -> tuple[int, int]:
    """Bytes of a state that don't depend on what was read, and bytes that each token adds, from two real states."""
    import torch

    sizes = []
    with torch.inference_mode():
        for n in (1, 2):
            ids = torch.zeros((1, n), dtype=torch.int64, device=model.head_weight.device)
            state = model(ids, return_state=True, logits_to_keep=1).state
            sizes.append(int(state.nbytes))
    per_token = sizes[1] - sizes[0]
    return sizes[0] - per_token, per_token


def _by_hop(name: str, values: Sequence[float], last: int) -> dict[str, float]:
    """``name_hop_1`` .. ``name_hop_<last>``; what is missing at the end repeats the last value (0 without any)."""
    padded = [*values, *[values[-1] if values else 0.0] * (last - len(values))]
    return {f"{name}_hop_{n}": float(value) for n, value in enumerate(padded[:last], 1)}


def _row(group: str, measured: Sequence[Mapping[str, float]], samples: int, seed: int) -> Row:
    row: Row = {"group": group, "questions": float(len(measured))}
    for key in dict.fromkeys(key for m in measured for key in m):
        values = [m[key] for m in measured if key in m]
        row[key] = sum(values) / len(values)
        if key in SCORES:
            interval = bootstrap_interval(values, samples, derive_seed(seed, "bootstrap", group))
            row[f"{key}_low"], row[f"{key}_high"] = interval
    return row


def _median(values: Sequence[float]) -> float:
    middle = sorted(values)
    n = len(middle)
    return (middle[(n - 1) // 2] + middle[n // 2]) / 2


# --- what is shown ------------------------------------------------------------------------------------------


def score(row: Mapping[str, Any], key: str) -> str:
    """A score with its interval, such as ``.437 (.352-.523)``; a dash where it was not measured."""
    if row.get(key) in (None, ""):
        return "-"
    value, low, high = (_short(row[name]) for name in (key, f"{key}_low", f"{key}_high"))
    return f"{value} ({low}-{high})"


def _short(value: Any) -> str:
    text = f"{float(value):.3f}"
    return text.removeprefix("0") if text.startswith("0.") else text


def as_table(rows: Sequence[Row], title: str = "rag") -> Table:
    """The scores by group, for the screen."""
    from rich import box
    from rich.table import Table

    hops = [key for key in rows[0] if key.startswith("support_recall_hop_")]
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("group")
    headings = [f"hop {key.removeprefix('support_recall_hop_')}" for key in hops]
    for heading in ("questions", *SCORES.values(), *headings, "hops", "docs", "prompt tokens", "new tokens"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            str(row["group"]),
            f"{float(row['questions']):.0f}",
            *(score(row, key) for key in SCORES),
            *(_short(row[key]) if key in row else "-" for key in hops),
            *(f"{float(row[key]):.1f}" for key in ("hops", "documents")),
            f"{float(row['prompt_tokens']):.0f}",
            f"{float(row['new_tokens']):.1f}",
        )
    return table


def cost_table(row: Row) -> Table:
    """What the documents of each hop cost, for the screen; means over all questions."""
    from rich import box
    from rich.table import Table

    table = Table(title="one question", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("prompt with the documents of")
    for heading in ("prompt tokens", "state (MiB)", "first token (s)"):
        table.add_column(heading, justify="right")
    last = sum(key.startswith("prompt_tokens_hop_") for key in row)
    for n in range(1, last + 1):
        label = "hop 1" if n == 1 else f"hops 1 to {n}"
        table.add_row(label, *_costs(row, f"_hop_{n}"))
    if not last:
        table.add_row("no hop", *_costs(row, ""))
    return table


def _costs(row: Row, suffix: str) -> tuple[str, str, str]:
    seconds = row.get(f"first_token_seconds{suffix}")
    return (
        f"{float(row[f'prompt_tokens{suffix}']):.0f}",
        f"{float(row[f'state_bytes{suffix}']) / 2**20:.2f}",
        "-" if seconds is None else f"{float(seconds):.2f}",
    )


def samples_table(records: Sequence[Mapping[str, Any]], n: int = 4) -> Table:
    """A few questions with their answers, spread over the file, for the screen."""
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    table = Table(title="samples", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("question", "expected", "answer"):
        table.add_column(heading, overflow="fold")
    table.add_column("F1", justify="right")
    for record in records[:: max(1, len(records) // n)][:n]:
        answer = " ".join(str(record["completion"]).split())
        texts = (str(record["question"]), str(record["answers"][0]), answer or "(nothing)")
        table.add_row(*map(escape, texts), _short(record["f1"]))
    return table


def prompt_text(ids: Sequence[int], tokenizer: Tokenizer) -> str:
    """A prompt as text, control tokens shown by name."""
    parts, plain = [], list[int]()
    for token_id in [*ids, None]:
        if token_id is not None and token_id not in tokenizer.control_ids:
            plain.append(token_id)
            continue
        parts.append(tokenizer.decode(plain))
        plain = []
        if token_id is not None:
            parts.append(tokenizer.token(token_id) or "")
    return "".join(parts)


# --- the task ---------------------------------------------------------------------------------------------


def run_rag(run: Run, split: str, rag: Mapping[str, Any], adapter_path: str | None) -> None:
    """Measure the run's model with the run's retriever on the run's data, and record everything.

    Raises:
        ConfigError: a key of ``rag`` that can't be, no trained model, or data without questions.
        CheckpointError: model or adapter can't be read.
        DataError: a broken data file, or no question in this part.
    """
    import json

    from refragkit.console import console
    from refragkit.tasks.trained_model import check_run, trained_model
    from refragkit.tracking.rag_plot import plot_rag

    settings = check_settings(rag)
    check_run(run)
    questions = _questions(run, split)
    reward = run.reward
    tokenizer = run.tokenizer
    retriever = run.retriever
    model = trained_model(run, tokenizer, adapter_path)
    described = describe(run, retriever, adapter_path)
    log.info(
        "%s %s questions, %s, at most %d new tokens, %s",
        f"{len(questions):,}",
        split,
        _retrieval_title(described),
        settings.max_new_tokens,
        run.hardware.resolved_precision(),
    )
    started = time.perf_counter()
    evaluation = evaluate_rag(
        model,
        tokenizer,
        retriever,
        questions,
        reward,
        settings,
        seed=run.seed,
        examples=_examples(run, settings.examples),
        precision=run.hardware.autocast(),
    )
    rows, records = evaluation.rows, evaluation.records
    rows[0]["evaluate_seconds"] = time.perf_counter() - started
    title = f"{described['model']}: {_retrieval_title(described)}, {split} questions"
    console.print(as_table(rows, title))
    console.print(cost_table(rows[0]))
    console.print(samples_table(records))
    _warn(rows[0], settings)

    write_csv([{**described, **row} for row in rows], run.folder / "rag.csv")
    lines = (json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    write_atomically(run.folder / "samples.jsonl", "".join(lines))
    write_atomically(run.folder / "prompt.txt", prompt_text(evaluation.first_prompt, tokenizer) + "\n")
    run.log_metrics(as_metrics(rows, "rag"), step=0)
    run.artifact("rag", run.folder / "rag.csv")
    run.artifact("samples", run.folder / "samples.jsonl")
    run.artifact("prompt", run.folder / "prompt.txt")
    run.artifact("rag_plot", plot_rag(rows, run.folder / "plots" / "rag.png", title))
    run.tracking.log_traces(records[:_TRACES], 0)
    _show_sweep(run.folder)


def _questions(run: Run, split: str) -> list[Question]:
    data = run.data
    parts: dict[str, Sequence[Any]] = {"train": data.train, "validation": data.validation}
    questions = [q for name, part in parts.items() if split in ("all", name) for q in part]
    name, source = str(run.cfg.choices.data), str(run.cfg.data.get("path") or "bundled sample")
    if not questions:
        raise DataError(
            f"split={split}: data={name} ({source}) has no question in this part; choose another split or data.path"
        )
    if not all(isinstance(q, Question) for q in questions):
        raise ConfigError(
            f"evaluate=rag needs questions with answers, and data={name} has none; choose data=multihop_qa"
        )
    run.tracking.log_dataset(f"{name}-{split}", "evaluation", data.fingerprint, source, len(questions))
    return questions


def _examples(run: Run, n: int) -> list[Question]:
    """One more than n training questions, since a question is no example of itself; the same ones in every run."""
    from refragkit.data.split import subset_positions

    if not n:
        return []
    train = [q for q in run.data.train if isinstance(q, Question)]
    if n >= len(train):
        raise ConfigError(
            f"rag.examples={n}: expected fewer than the {len(train)} training questions of data.path"
        )
    return [train[i] for i in subset_positions([q.id for q in train], n + 1)]


def describe(run: Run, retriever: MultiHopRetriever | None, adapter_path: str | None) -> Row:
    """What a row of the table was measured with."""
    cfg = run.cfg.model
    if cfg.init is not None:
        model = str(cfg.init)
    elif cfg.path is not None:
        model = "/".join(Path(cfg.path).expanduser().absolute().parts[-2:])
    else:  # a size that stands for a pretrained model
        model = f"{run.cfg.choices.model} {cfg.size}"
    if adapter_path is not None:
        model += f" + {Path(adapter_path).name}"
    if retriever is None:
        return {"model": model, "retriever": "none", "planner": "", "max_hops": 0.0, "top_k_per_hop": 0.0}
    return {
        "model": model,
        "retriever": str(run.cfg.choices.retriever),
        "planner": retriever.planner.name,
        "max_hops": float(retriever.max_hops),
        "top_k_per_hop": float(retriever.top_k_per_hop),
    }


def _retrieval_title(described: Mapping[str, Any]) -> str:
    if described["retriever"] == "none":
        return "no documents"
    hops, k = (int(float(described[key])) for key in ("max_hops", "top_k_per_hop"))
    return f"{described['retriever']}, {described['planner']}, {hops} x {k} documents"


def _warn(row: Row, settings: Settings) -> None:
    n = float(row["questions"])
    if row["too_long"]:
        log.warning(
            "%.0f of %.0f questions don't fit into rag.max_seq_len=%d and count as wrong",
            float(row["too_long"]) * n,
            n,
            settings.max_seq_len,
        )
    if row["left_out_documents"]:
        log.warning(
            "%.1f documents a question were left out to fit into rag.max_seq_len=%d",
            float(row["left_out_documents"]),
            settings.max_seq_len,
        )
    if float(row["ended"]) < 0.5:
        log.info(
            "%.0f%% of the answers were cut off at rag.max_new_tokens=%d",
            100 * (1 - float(row["ended"]) - float(row["too_long"])),
            settings.max_new_tokens,
        )


def _show_sweep(folder: Path) -> None:
    """In a sweep: one table of the jobs that are done, this one included, on the screen and in ``rag.csv`` above."""
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    if not HydraConfig.initialized() or HydraConfig.get().mode != RunMode.MULTIRUN:
        return
    from refragkit.console import console

    rows = sweep_rows(folder.parent)
    if len(rows) > 1:
        console.print(sweep_table(rows))
        write_csv(rows, folder.parent / "rag.csv")


def sweep_rows(folder: Path) -> list[Row]:
    """The row ``all`` of each job in a sweep's folder that has one, in the order of the jobs."""
    import csv

    rows: list[Row] = []
    number = {path: path.parent.name.split("-")[0] for path in folder.glob("*/rag.csv")}
    for path in sorted(number, key=lambda p: (int(number[p]) if number[p].isdigit() else math.inf, str(p))):
        with path.open(encoding="utf-8", newline="") as file:
            rows.append({"job": path.parent.name, **next(csv.DictReader(file))})
    return rows


def sweep_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Jobs beside each other, for the screen."""
    from rich import box
    from rich.table import Table

    table = Table(title="this sweep so far", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("model", "documents"):
        table.add_column(heading, overflow="fold")
    for heading in ("questions", *SCORES.values(), "docs", "prompt tokens"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            str(row["model"]),
            _retrieval_title(row),
            f"{float(row['questions']):.0f}",
            *(score(row, key) for key in SCORES),
            f"{float(row['documents']):.1f}",
            f"{float(row['prompt_tokens']):.0f}",
        )
    return table
