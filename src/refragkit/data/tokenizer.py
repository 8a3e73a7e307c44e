"""Text to token ids: a byte-level BPE trained here, or any Hugging Face tokenizer folder.

Plain text never becomes a control token: ``encode("<|end|>")`` gives the ids of those seven characters, so
that a retrieved document can't close its own turn. Control tokens enter a sequence by id only.

Source: Sennrich et al. 2016 (arXiv 1508.07909), byte-level as in GPT-2; digits split one by one.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

from refragkit.errors import ConfigError, DataError

SPECIAL_TOKENS: tuple[str, ...] = (
    "<|pad|>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|retrieval|>",
    "<|search|>",
    "<|doc|>",
    "<|end|>",
)
MIN_VOCAB_SIZE = 256 + len(SPECIAL_TOKENS)
"""Every byte and every special token."""

_FORMAT = "refragkit-bpe-1"
_CONFIG_FILE = "tokenizer_config.json"
_TOKENIZER_FILE = "tokenizer.json"
_ANY_TOKENIZER_FILE = (_TOKENIZER_FILE, _CONFIG_FILE, "tokenizer.model", "vocab.json")
# Control tokens of pretrained tokenizers that their authors forgot to flag as special.
_LOOKS_LIKE_CONTROL = re.compile(r"^<[|｜].*[|｜]>$", re.DOTALL)


def has_tokenizer(folder: str | Path) -> bool:
    """Whether a model's folder also holds a tokenizer."""
    return any((Path(folder) / name).is_file() for name in _ANY_TOKENIZER_FILE)


class Tokenizer:
    """Encodes and decodes text, and knows the control tokens.

    Build one with `Tokenizer.train` or `Tokenizer.load`.

    Attributes:
        vocab_size: highest id + 1, special tokens included.
        pad_id: fills batches; masked everywhere, so it may equal another id.
        end_id: closes an assistant turn; what generation stops at.
        bos_id: what a pretrained model expects in front of every text, if anything.
        special_ids: the tokens of `SPECIAL_TOKENS` that this tokenizer has (all of them, unless it brings
            a chat template of its own).
        added_ids: of these, what `load` has just added to a pretrained tokenizer: its model doesn't know them yet.
        control_ids: every id that plain text must not produce.
        chat_template: the Jinja template of a pretrained chat tokenizer, else None.
        fingerprint: sha256 of everything that decides what ids a text gets.
    """

    def __init__(
        self, backend: tokenizers.Tokenizer, pretrained: Any = None, new_tokens: Sequence[str] = ()
    ) -> None:
        """Wrap a ``tokenizers`` object.

        Args:
            backend: the object.
            pretrained: the transformers tokenizer that it came from.
            new_tokens: special tokens that its model was not trained with.
        """
        # A pretrained folder may carry these; they would silently cut or pad what we encode.
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = True
        self._backend = backend
        self._pretrained = pretrained
        self._with_control_tokens: tokenizers.Tokenizer | None = None

        added = backend.get_added_tokens_decoder()
        vocabulary = backend.get_vocab(with_added_tokens=True)
        self.vocab_size: int = max(vocabulary.values(), default=-1) + 1
        self.special_ids: dict[str, int] = {t: vocabulary[t] for t in SPECIAL_TOKENS if t in vocabulary}
        self.added_ids: dict[str, int] = {t: vocabulary[t] for t in new_tokens}
        self.control_ids: frozenset[int] = frozenset(
            [i for i, t in added.items() if t.special or _LOOKS_LIKE_CONTROL.match(t.content)]
            + list(self.special_ids.values())
        )
        self.chat_template: str | None = getattr(pretrained, "chat_template", None)
        self.bos_id: int | None = _bos_id(backend, pretrained)
        self.end_id: int = self._find_end_id()
        self.pad_id: int = self._find_pad_id()
        self.fingerprint: str = _fingerprint(backend, self.chat_template)

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int, cache_dir: str | Path | None = None) -> Tokenizer:
        """Train a byte-level BPE; the same texts and size always give the same tokenizer.

        Args:
            texts: what to learn merges from.
            vocab_size: upper bound of the vocabulary, special tokens included (a small text may
                have fewer merges).
            cache_dir: where to keep the result, under the hash of texts and size; None keeps nothing.

        Raises:
            ConfigError: ``vocab_size`` can't hold all bytes and special tokens.
            DataError: there is no text.
        """
        if vocab_size < MIN_VOCAB_SIZE:
            raise ConfigError(
                f"data.vocab_size: expected at least {MIN_VOCAB_SIZE} (256 bytes and "
                f"{len(SPECIAL_TOKENS)} special tokens), got {vocab_size}"
            )
        texts = [text for text in texts if text]
        if not texts:
            raise DataError("a tokenizer can't be trained on no text: the corpus and the questions are empty")
        folder: Path | None = None
        if cache_dir is not None:
            folder = (
                Path(cache_dir) / "tokenizers" / f"bpe-{vocab_size}-{_training_hash(texts, vocab_size)[:16]}"
            )
            cached = _read_trained(folder)
            if cached is not None:
                return cls(cached)
        tokenizer = cls(_train_bpe(texts, vocab_size))
        if folder is not None:
            tokenizer.save(folder)
        return tokenizer

    @classmethod
    def load(cls, folder: str | Path, add_special_tokens: bool | None = None) -> Tokenizer:
        """Load a tokenizer folder: one that `save` wrote, or any that transformers can read.

        Args:
            folder: holds ``tokenizer.json`` or the files of a slow tokenizer that can be converted.
            add_special_tokens: add what is missing of `SPECIAL_TOKENS` behind the vocabulary. None: only if
                there is no chat template, which does without them and leaves the vocabulary size alone.

        Raises:
            DataError: no such folder, or not a tokenizer.
        """
        path = Path(folder).expanduser()
        if not path.is_dir():
            raise DataError(
                f"{path}: expected a tokenizer folder (with {_TOKENIZER_FILE}), but there is none"
            )
        if _is_ours(path):
            backend = _read_trained(path)
            if backend is None:
                raise DataError(f"{path}: {_TOKENIZER_FILE} does not match its {_CONFIG_FILE}; save it again")
            return cls(backend)

        from transformers import AutoTokenizer, PretrainedConfig

        try:
            pretrained = AutoTokenizer.from_pretrained(
                str(path),
                # Our own model beside it is nothing that transformers knows, and it would say so
                config=PretrainedConfig() if _is_beside_our_model(path) else None,
                local_files_only=True,
                trust_remote_code=False,
            )
        except Exception as error:  # transformers raises many types for files that it can't read
            first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise DataError(f"{path}: can't be read as a Hugging Face tokenizer ({first_line})") from error
        backend = getattr(pretrained, "backend_tokenizer", None)
        if not isinstance(backend, tokenizers.Tokenizer):
            raise DataError(f"{path}: expected a fast tokenizer, got {type(pretrained).__name__}")
        if isinstance(pretrained.chat_template, dict):
            pretrained.chat_template = pretrained.get_chat_template()
        if add_special_tokens is None:
            add_special_tokens = not pretrained.chat_template
        missing: list[str] = []
        if add_special_tokens:
            known = pretrained.get_vocab()
            missing = [t for t in SPECIAL_TOKENS if t not in known]
            pretrained.add_tokens(
                [AddedToken(t, special=True, normalized=False) for t in missing], special_tokens=True
            )
        return cls(pretrained.backend_tokenizer, pretrained, missing)

    def save(self, folder: str | Path) -> None:
        """Write files that `load` and ``transformers.AutoTokenizer`` read into ``folder``.

        Other files there are left alone. Each file is replaced as a whole; the one that vouches for the
        others comes last.
        """
        target = Path(folder)
        target.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=".tokenizer-", suffix=".tmp", dir=target))
        try:
            if self._pretrained is not None:
                self._pretrained.save_pretrained(str(work))
            else:
                text = self._backend.to_str(pretty=False)
                (work / _TOKENIZER_FILE).write_text(text, encoding="utf-8")
                config = {
                    "tokenizer_class": "PreTrainedTokenizerFast",
                    "pad_token": "<|pad|>",
                    "eos_token": "<|end|>",
                    "clean_up_tokenization_spaces": False,
                    "refragkit": {"format": _FORMAT, "sha256": hashlib.sha256(text.encode()).hexdigest()},
                }
                (work / _CONFIG_FILE).write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
            for file in sorted(work.iterdir(), key=lambda f: (f.name == _CONFIG_FILE, f.name)):
                file.replace(target / file.name)
        finally:
            shutil.rmtree(work, ignore_errors=True)

    def encode(self, text: str) -> list[int]:
        """Ids of a plain text, without control tokens, whatever the text looks like."""
        return self._guard(text, list(self._backend.encode(text, add_special_tokens=False).ids))

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` of every text."""
        encodings = self._backend.encode_batch(list(texts), add_special_tokens=False)
        return [
            self._guard(text, list(encoding.ids)) for text, encoding in zip(texts, encodings, strict=True)
        ]

    def encode_template(self, text: str) -> list[int]:
        """Ids of a piece of a chat template, in which names of control tokens do become control tokens."""
        if self._with_control_tokens is None:
            copy = tokenizers.Tokenizer.from_str(self._backend.to_str())
            copy.encode_special_tokens = False
            self._with_control_tokens = copy
        return list(self._with_control_tokens.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ``ids``, special tokens left out."""
        return self._backend.decode([i for i in ids if i not in self.control_ids], skip_special_tokens=True)

    def token(self, token_id: int) -> str | None:
        """The vocabulary entry of an id, None if there is none."""
        return self._backend.id_to_token(token_id)

    def render_template(self, messages: Sequence[dict[str, str]], add_generation_prompt: bool) -> str:
        """The text that the chat template makes of ``messages``.

        Raises:
            DataError: the template refuses them (some know no system turn, or want turns to alternate).
        """
        if self._pretrained is None or not self.chat_template:
            raise ValueError("this tokenizer has no chat template")
        try:
            text = self._pretrained.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=add_generation_prompt
            )
        except Exception as error:  # Jinja errors and whatever a template raises
            roles = ", ".join(m["role"] for m in messages)
            raise DataError(
                f"the tokenizer's chat template refuses turns with the roles [{roles}]: {error}"
            ) from error
        return str(text)

    def _guard(self, text: str, ids: list[int]) -> list[int]:
        """``ids``, unless text became a control token: then the text is encoded in parts that can't."""
        if self.control_ids.isdisjoint(ids):
            return ids
        encoding = self._backend.encode(text, add_special_tokens=False)
        parts: list[str] = []
        position = 0
        for token_id, (start, stop) in zip(encoding.ids, encoding.offsets, strict=True):
            if token_id not in self.control_ids:
                continue
            # A cut behind the first character leaves two pieces, neither of which is the token. A control
            # token of a single character can only be left out.
            parts.append(text[position : start + 1] if stop - start > 1 else text[position:start])
            position = start + 1 if stop - start > 1 else stop
        parts.append(text[position:])
        if parts == [text]:
            return [i for i in ids if i not in self.control_ids]
        return [i for part in parts if part for i in self.encode(part)]

    def _find_end_id(self) -> int:
        if self.chat_template:
            slot = "refragkit-answer-slot"
            turns = [{"role": "user", "content": "question"}, {"role": "assistant", "content": slot}]
            tail = self.render_template(turns, add_generation_prompt=False).rpartition(slot)[2]
            for token_id in self.encode_template(tail):
                if token_id in self.control_ids:
                    return token_id
        if "<|end|>" in self.special_ids:
            return self.special_ids["<|end|>"]
        end_id = getattr(self._pretrained, "eos_token_id", None)
        if end_id is None:
            raise DataError("the tokenizer has neither <|end|> nor an end-of-sequence token")
        return int(end_id)

    def _find_pad_id(self) -> int:
        if "<|pad|>" in self.special_ids:
            return self.special_ids["<|pad|>"]
        pad_id = getattr(self._pretrained, "pad_token_id", None)
        return int(pad_id) if pad_id is not None else self.end_id


def _train_bpe(texts: list[str], vocab_size: int) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(t, special=True, normalized=False) for t in SPECIAL_TOKENS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer=trainer)
    return backend


def _training_hash(texts: list[str], vocab_size: int) -> str:
    """What a trained tokenizer depends on, the library's version included."""
    digest = hashlib.sha256(f"{_FORMAT} {tokenizers.__version__} {vocab_size}".encode())
    for text in texts:
        data = text.encode("utf-8")
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()


def _is_ours(folder: Path) -> bool:
    try:
        config = json.loads((folder / _CONFIG_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and "refragkit" in config


def _is_beside_our_model(folder: Path) -> bool:
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and config.get("model_type") == "refragkit"


def _read_trained(folder: Path) -> tokenizers.Tokenizer | None:
    """The tokenizer that `Tokenizer.save` wrote into ``folder``; None if missing or damaged."""
    try:
        config = json.loads((folder / _CONFIG_FILE).read_text(encoding="utf-8"))
        data = (folder / _TOKENIZER_FILE).read_bytes()
        if config["refragkit"] != {"format": _FORMAT, "sha256": hashlib.sha256(data).hexdigest()}:
            return None
        return tokenizers.Tokenizer.from_str(data.decode("utf-8"))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _bos_id(backend: tokenizers.Tokenizer, pretrained: Any) -> int | None:
    """The id that the tokenizer's own post-processor puts first, if it is its beginning-of-sequence token."""
    bos_id = getattr(pretrained, "bos_token_id", None)
    if bos_id is None or backend.encode("", add_special_tokens=True).ids[:1] != [bos_id]:
        return None
    return int(bos_id)


def _fingerprint(backend: tokenizers.Tokenizer, chat_template: str | None) -> str:
    state = json.dumps(json.loads(backend.to_str()), sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(f"{state}\n{chat_template or ''}".encode()).hexdigest()
