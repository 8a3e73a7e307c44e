"""From questions to model input: retrieval for a batch, the conversation of an episode, rendering.

The retriever is frozen and its planner asks the same question the same way every time, so a question's hops are kept
after the first search and its passages are never searched for twice in a run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from refragkit.data.conversation import Rendered, conversation_from_hops, prepare_prompt, render
from refragkit.types import Conversation, Hop, Message, Question, TokenSequence

if TYPE_CHECKING:
    from refragkit.data.tokenizer import Tokenizer
    from refragkit.retrievers.multi_hop import MultiHopRetriever


class EpisodeBuilder:
    """Retrieves for questions and renders episodes within the context length.

    Args:
        retriever: None answers from the question alone.
        tokenizer: renders the conversations.
        max_seq_len: tokens of a whole training example.
        max_new_tokens: tokens kept free for an answer when a prompt is cut to size.
        max_document_tokens: tokens of one document; None means no limit of its own.
        order: where the question stands, one of ``refragkit.data.conversation.ORDERS``.
        front: the turns in front of a question, such as a system turn or examples; None for none.
    """

    def __init__(
        self,
        retriever: MultiHopRetriever | None,
        tokenizer: Tokenizer,
        max_seq_len: int,
        max_new_tokens: int,
        max_document_tokens: int | None = None,
        order: str = "question_first",
        front: Callable[[Question], Sequence[Message]] | None = None,
    ) -> None:
        self.retriever = retriever
        self.tokenizer = tokenizer
        self.max_seq_len = max_seq_len
        self.max_new_tokens = max_new_tokens
        self.max_document_tokens = max_document_tokens
        self.order = order
        self.front = front
        self._hops: dict[str, tuple[Hop, ...]] = {}

    def retrieve(self, questions: Sequence[Question]) -> list[tuple[Hop, ...]]:
        """The hops of each question; one batched multi-hop search for those not seen before."""
        if self.retriever is None:
            return [() for _ in questions]
        new = {q.id: q for q in questions if q.id not in self._hops}
        if new:
            for identifier, hops in zip(new, self.retriever.retrieve(list(new.values())), strict=True):
                self._hops[identifier] = hops
        return [self._hops[q.id] for q in questions]

    def prompt(self, question: Question, hops: Sequence[Hop]) -> list[int]:
        """Token ids that end where the assistant's answer begins; empty where the question alone is too long."""
        return self.prepare(question, hops).input_ids

    def prepare(self, question: Question, hops: Sequence[Hop]) -> Rendered:
        """The prompt, and how many documents had to be cut for it."""
        asked = conversation_from_hops(question.question, hops, conversation_id=question.id, order=self.order)
        return prepare_prompt(
            self.with_front(question, asked),
            self.tokenizer,
            self.max_seq_len,
            self.max_new_tokens,
            max_document_tokens=self.max_document_tokens,
        )

    def example(self, question: Question, hops: Sequence[Hop], answer: str) -> Rendered:
        """The prompt followed by ``answer`` and the end token, which alone are supervised."""
        answered = conversation_from_hops(
            question.question, hops, answer, conversation_id=question.id, order=self.order
        )
        return self.conversation(self.with_front(question, answered))

    def with_front(self, question: Question, conversation: Conversation) -> Conversation:
        """The conversation of a question behind what stands in front of it."""
        if self.front is None:
            return conversation
        return replace(conversation, messages=(*self.front(question), *conversation.messages))

    def conversation(self, conversation: Conversation) -> Rendered:
        """A whole conversation with its loss mask; without tokens where it can't be used."""
        if isinstance(conversation, TokenSequence):
            if len(conversation.input_ids) > self.max_seq_len:
                return Rendered([], [], dropped="too_long")
            return Rendered(list(conversation.input_ids), list(conversation.loss_mask))
        return render(
            conversation,
            self.tokenizer,
            self.max_seq_len,
            reserve_tokens=self.max_new_tokens,
            max_document_tokens=self.max_document_tokens,
        )
