"""``data=tokens``: what is trained on, held out and refused, for files of either layout."""

from __future__ import annotations

import hashlib
import inspect
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch.nn import functional

from refragkit.config import conf_dir
from refragkit.data.collate import IGNORED, collate
from refragkit.data.datamodule import Conversations
from refragkit.data.token_file import new_token_file
from refragkit.data.tokenization import Rendering, tokenize_conversations
from refragkit.data.tokenizer import Tokenizer
from refragkit.data.tokens import Tokens, TokenSequences, hold_out_groups
from refragkit.errors import ConfigError, DataError
from refragkit.methods.episodes import EpisodeBuilder

TEXT = "Who wrote Hamlet, and when? She did, my friend; what is it? I don't know."


def seed_file(path: Path, examples: list[list[int]]) -> Path:
    """The seed's layout, packed here."""
    data = struct.pack("<I", len(examples))
    for ids in examples:
        data += struct.pack(f"<I{len(ids)}I", len(ids), *ids)
    path.write_bytes(data)
    return path


def sequences(n: int) -> list[list[int]]:
    return [[i, *range(1 + i % 5), i + 1] for i in range(n)]


def prepared(path: Path, **options: Any) -> Tokens:
    data = Tokens(str(path), **options)
    data.prepare()
    return data


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    Tokenizer.train([TEXT] * 3, 290).save(folder)
    return folder


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """40 conversations; each opening is that of two of them."""
    path = tmp_path_factory.mktemp("chat") / "chat.jsonl"
    with path.open("w") as f:
        for n in range(40):
            turns = [
                ("user", f"{n // 2} {TEXT}"),
                ("assistant", f"She, {n}."),
                ("user", "And?"),
                ("assistant", TEXT[n:]),
            ]
            messages = [{"role": role, "content": text} for role, text in turns]
            f.write(json.dumps({"id": str(n), "messages": messages}) + "\n")
    return path


@pytest.fixture(scope="module")
def v2(chat: Path, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokens") / "chat.bin"
    tokenizer = Tokenizer.load(folder)
    with new_token_file(path, "v2", tokenizer.fingerprint, tokenizer.vocab_size) as writer:
        tokenize_conversations(chat, Rendering(str(folder), 300), tokenizer, writer)
        writer.commit()
    return path


def test_the_seeds_files_are_learnt_but_for_the_first_token(tmp_path: Path) -> None:
    seed_file(tmp_path / "a.bin", [[5, 6, 7], [], [8], [9, 4]] * 3)
    data = prepared(tmp_path / "a.bin", validation_path=str(seed_file(tmp_path / "b.bin", [[3, 2, 1]])))
    counts = {"train_examples": 6, "validation_examples": 1, "examples_in_files": 13, "too_short": 6}
    assert data.counts == counts
    for example in [*data.train, *data.validation]:
        assert example.input_ids in ((5, 6, 7), (9, 4), (3, 2, 1)) and example.messages == ()
        assert example.loss_mask == (False, *[True] * (len(example.input_ids) - 1))


def test_the_loss_of_a_seed_file_is_that_of_every_next_token(tmp_path: Path, folder: Path) -> None:
    data = prepared(seed_file(tmp_path / "a.bin", sequences(20)))
    builder = EpisodeBuilder(None, Tokenizer.load(folder), 100, 4)
    batch = collate([builder.conversation(e) for e in data.train], pad_id=0)
    logits = torch.randn(*batch.labels.shape, 64, generator=torch.Generator().manual_seed(0))
    found = functional.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), ignore_index=IGNORED)
    losses = []
    for row, example in enumerate(data.train):
        ids = torch.tensor(example.input_ids)
        losses.append(functional.cross_entropy(logits[row, : len(ids) - 1], ids[1:], reduction="none"))
    torch.testing.assert_close(found, torch.cat(losses).mean())


def test_our_files_keep_mask_and_split_like_the_conversations_they_came_from(
    v2: Path, chat: Path, folder: Path
) -> None:
    tokenizer = Tokenizer.load(folder)
    builder = EpisodeBuilder(None, tokenizer, 300, 4)
    data = prepared(v2, validation_examples=8)
    assert len(data.train) == 32 and len(data.validation) == 8
    source = Conversations(str(chat), validation_path=str(chat), tokenizer=str(folder))
    source.prepare()
    expected = {tuple(r.input_ids): r.loss_mask for r in map(builder.conversation, source.train)}
    for example in [*data.train, *data.validation]:
        assert list(example.loss_mask) == expected[example.input_ids]
    openings = [{int(e.id.partition("#")[2]) // 2 for e in part} for part in (data.train, data.validation)]
    assert not openings[0] & openings[1] and len(openings[1]) == 4


def test_an_example_that_does_not_fit_is_dropped(v2: Path, folder: Path) -> None:
    data = prepared(v2)
    longest = max(len(e.input_ids) for e in data.train)
    builder = EpisodeBuilder(None, Tokenizer.load(folder), longest - 1, 4)
    rendered = [builder.conversation(e) for e in data.train]
    assert {r.dropped for r in rendered} == {"", "too_long"}
    assert all(
        bool(r.dropped) == (len(e.input_ids) == longest) for r, e in zip(rendered, data.train, strict=True)
    )


def test_a_first_token_is_never_a_target(tmp_path: Path) -> None:
    with new_token_file(tmp_path / "a.bin", "v2", hashlib.sha256(b"").hexdigest(), 50) as writer:
        for n in range(10):
            writer.append(
                np.arange(n, n + 3, dtype=np.uint32),
                np.ones(3, dtype=np.bool_),
                np.array([3]),
                np.array([n], dtype=np.uint64),
            )
        writer.commit()
    data = prepared(tmp_path / "a.bin")
    assert all(e.loss_mask == (False, True, True) for e in data.train)


def test_a_folder_of_parts_is_read_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for n in range(11):
        seed_file(tmp_path / f"train_{n}.bin", [[n, n, 1], [n, n, 2]])
    (tmp_path / "train.json").write_text("{}")
    data = prepared(tmp_path, validation_path=str(seed_file(tmp_path / "held.txt", [[1, 2]])))
    assert [e.input_ids for e in data.train] == [(n, n, k) for n in range(11) for k in (1, 2)]
    assert [e.id for e in data.train][-2:] == ["train_10.bin#0", "train_10.bin#1"]
    assert [e.input_ids for e in data.validation] == [(1, 2)]


def test_examples_are_a_sequence(tmp_path: Path) -> None:
    data = prepared(seed_file(tmp_path / "a.bin", sequences(30)))
    train = data.train
    assert isinstance(train, TokenSequences) and isinstance(train[:4], TokenSequences)
    assert list(train[:4]) == [train[i] for i in range(4)] and train[-1] == list(train)[-1]
    assert len(train[5:1]) == 0
    with pytest.raises(IndexError):
        train[len(train)]
    batches = list(data.train_loader(4, 3))
    assert [b.index for b in batches] == [0, 1, 2] and all(e in list(train) for e in batches[0].examples)
    assert hash(batches[0]) != hash(batches[1])


def test_split_and_subset_follow_from_contents_alone(tmp_path: Path) -> None:
    examples = sequences(60)
    one = prepared(seed_file(tmp_path / "a.bin", examples), validation_examples=10, seed=1)
    other = prepared(seed_file(tmp_path / "b.bin", examples[::-1]), validation_examples=10, seed=2)
    assert len(one.validation) == 10
    assert {e.input_ids for e in one.validation} == {e.input_ids for e in other.validation}
    few, more = (
        prepared(tmp_path / "a.bin", validation_examples=10, max_train_examples=n, max_validation_examples=3)
        for n in (5, 20)
    )
    assert len(few.train) == 5 and len(few.validation) == 3
    assert {e.id for e in few.train} < {e.id for e in more.train} < {e.id for e in one.train}
    assert few.fingerprint != more.fingerprint and one.fingerprint != other.fingerprint
    again = prepared(tmp_path / "a.bin", validation_examples=10)
    assert again.fingerprint == one.fingerprint


def test_whole_groups_are_held_out() -> None:
    groups = np.array([9, 3, 3, 7, 9, 1, 9], dtype=np.uint64)
    assert hold_out_groups(groups, 1).tolist() == [False] * 5 + [True, False]
    # 1, then both of 3; 9 would be too many
    assert hold_out_groups(groups, 3).tolist() == [False, True, True, False, False, True, False]
    assert hold_out_groups(groups, 5).tolist() == [False, True, True, True, False, True, False]
    assert not hold_out_groups(groups[:1].repeat(4), 3).any()


def test_another_tokenizer_is_refused(v2: Path, folder: Path, tmp_path: Path) -> None:
    prepared(v2).check_tokenizer(Tokenizer.load(folder))
    Tokenizer.train([TEXT * 2, "More words."], 290).save(tmp_path / "other")
    with pytest.raises(DataError, match=rf"{v2}: was written with another tokenizer \(sha256 "):
        prepared(v2).check_tokenizer(Tokenizer.load(tmp_path / "other"))
    assert prepared(v2).vocab_size == Tokenizer.load(folder).vocab_size


def test_ids_that_the_tokenizer_lacks_are_refused(folder: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(folder)
    examples = [*sequences(9), [1, tokenizer.vocab_size]]
    path = seed_file(tmp_path / "a.bin", examples)
    offset = path.stat().st_size - 4
    with pytest.raises(DataError, match=rf"a\.bin: byte {offset}: expected a token id below"):
        prepared(path).check_tokenizer(tokenizer)


def test_errors_name_the_key(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data.path: expected a token file .* got null"):
        Tokens().prepare()
    with pytest.raises(DataError, match=r"data.path: /nowhere: expected a token file, but there is no such"):
        prepared(Path("/nowhere"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(
        DataError, match=r"data.path: .*empty: expected token files \(\*.bin\) in this folder"
    ):
        prepared(tmp_path / "empty")
    path = seed_file(tmp_path / "a.bin", sequences(9))
    (tmp_path / "cut.bin").write_bytes(path.read_bytes()[:-4])
    with pytest.raises(DataError, match=r"data.validation_path: .*cut.bin: byte \d+: the file ends within"):
        prepared(path, validation_path=str(tmp_path / "cut.bin"))
    with pytest.raises(DataError, match=r"data.validation_path: expected examples of at least 2 tokens"):
        prepared(path, validation_path=str(seed_file(tmp_path / "short.bin", [[1]])))
    with pytest.raises(DataError, match=r"can't hold out 2 examples: too many open with the same turn"):
        prepared(seed_file(tmp_path / "same.bin", [[1, 2]] * 10), validation_examples=2)
    with pytest.raises(DataError, match="expected at least 2 examples"):
        prepared(seed_file(tmp_path / "one.bin", [[1, 2]]))
    with pytest.raises(ConfigError, match=r"data.validation_examples: expected an integer of at least 1"):
        prepared(path, validation_examples=0)
    with pytest.raises(ConfigError, match="data=tokens needs the tokenizer that wrote the files"):
        prepared(path).build_tokenizer()


def test_the_yaml_lists_every_parameter_with_its_default() -> None:
    config = yaml.safe_load((conf_dir() / "data" / "tokens.yaml").read_text(encoding="utf-8"))
    target: Callable[..., Any] = Tokens
    assert config.pop("_target_") == f"{target.__module__}.{target.__name__}"
    parameters = inspect.signature(target).parameters
    assert config == {k: p.default for k, p in parameters.items() if k not in {"cache_dir", "seed"}}
