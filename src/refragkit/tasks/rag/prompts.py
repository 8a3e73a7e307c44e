"""What a model is asked in ``evaluate=rag``."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from refragkit.data.conversation import Rendered, conversation_from_hops, prepare_prompt
from refragkit.seeding import derive_seed
from refragkit.types import Conversation, Hop, Message, Question

if TYPE_CHECKING:
    from refragkit.data.tokenizer import Tokenizer
    from refragkit.tasks.rag.settings import Settings


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
    messages = [*in_front(question, settings, examples), *asked.messages]
    if settings.instruction:
        messages.append(Message("user", settings.instruction))
    return prepare_prompt(
        Conversation(question.id, tuple(messages)),
        tokenizer,
        settings.max_seq_len,
        settings.max_new_tokens,
        max_document_tokens=settings.max_document_tokens,
    )


def in_front(question: Question, settings: Settings, examples: Sequence[Question] = ()) -> list[Message]:
    """The turns in front of a question: a system turn and examples, where there are any."""
    messages = [Message("system", settings.system)] if settings.system else []
    for example in [e for e in examples if e.id != question.id][: settings.examples]:
        messages += [Message("user", example.question), Message("assistant", example.answers[0])]
    return messages


def shuffled(hops: Sequence[Hop], seed: int) -> tuple[Hop, ...]:
    """The same documents in a random order over all hops; each hop keeps its number of them."""
    documents = [hit for hop in hops for hit in hop.new_documents]
    random.Random(seed).shuffle(documents)
    rest = iter(documents)
    return tuple(replace(hop, new_documents=tuple(next(rest) for _ in hop.new_documents)) for hop in hops)


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
