"""The plain data that passes between components: documents, hops, episodes, conversations, batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Role = Literal["system", "user", "assistant", "retrieval"]
ROLES: tuple[Role, ...] = ("system", "user", "assistant", "retrieval")


@dataclass(frozen=True, slots=True)
class Document:
    """One passage of a corpus.

    Attributes:
        doc_id: unique within its corpus.
        title: may be empty.
        text: the passage itself.
        metadata: whatever else the source carried; survives retrieval unchanged.
    """

    doc_id: str
    title: str
    text: str
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Hit:
    """A document found for a query; a higher score is a better match (the scale is the retriever's)."""

    document: Document
    score: float

    @property
    def doc_id(self) -> str:
        """The document's id."""
        return self.document.doc_id


@dataclass(frozen=True, slots=True)
class Hop:
    """One round of retrieval for one question.

    Attributes:
        hop: 1 for the first search.
        query: what was asked.
        hits: everything the search returned, best first.
        new_documents: the hits that no earlier hop of this question had found, best first.
        latency_seconds: this question's share of the batched search.
    """

    hop: int
    query: str
    hits: tuple[Hit, ...]
    new_documents: tuple[Hit, ...]
    latency_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Question:
    """A multi-hop question with its gold annotation.

    Attributes:
        id: unique within its file.
        question: the text.
        answers: the gold answer first, then its aliases; never empty.
        supporting_ids: doc ids of the gold passages.
        hops: how many passages the annotators needed.
        candidate_ids: the passages shipped with the question (gold and distractors).
        decomposition: MuSiQue's ``{question, answer, supporting_id}`` per hop, else empty.
        metadata: ``dataset``, ``type`` and whatever else the file carried.
    """

    id: str
    question: str
    answers: tuple[str, ...]
    supporting_ids: tuple[str, ...] = ()
    hops: int = 0
    candidate_ids: tuple[str, ...] = ()
    decomposition: tuple[Mapping[str, Any], ...] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Episode:
    """A question, what was retrieved for it, and what the model answered: the input of every reward."""

    question: str
    answers: tuple[str, ...] = ()
    supporting_ids: tuple[str, ...] = ()
    hops: tuple[Hop, ...] = ()
    completion: str = ""
    id: str = ""
    max_hops: int = 0
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def documents(self) -> tuple[Hit, ...]:
        """All distinct documents found, in the order in which they were found."""
        return tuple(hit for hop in self.hops for hit in hop.new_documents)


@dataclass(frozen=True, slots=True)
class Message:
    """One turn. A ``retrieval`` turn carries documents, and is never trained on."""

    role: Role
    content: str = ""
    hop: int = 0
    query: str = ""
    documents: tuple[Hit, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The JSON form of the design's conversation files."""
        if self.role != "retrieval":
            return {"role": self.role, "content": self.content}
        return {
            "role": self.role,
            "hop": self.hop,
            "query": self.query,
            "documents": [
                {"doc_id": h.doc_id, "title": h.document.title, "text": h.document.text, "score": h.score}
                for h in self.documents
            ],
        }


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation; ``id`` is unique within its file."""

    id: str
    messages: tuple[Message, ...]

    def to_dict(self) -> dict[str, Any]:
        """The JSON form of the design's conversation files."""
        return {"id": self.id, "messages": [m.to_dict() for m in self.messages]}


@dataclass(frozen=True, slots=True)
class TokenSequence(Conversation):
    """A conversation (or any text) of which a token file has kept the ids only: ``messages`` is empty.

    Attributes:
        input_ids: T ids.
        loss_mask: T flags; True where the token is to be learnt.
    """

    input_ids: tuple[int, ...]
    loss_mask: tuple[bool, ...]


class Batch:
    """One global batch: batch number ``index`` of a run, a pure function of (seed, index).

    Not a dataclass: Lightning walks into dataclasses to convert their tensors, and refuses frozen ones.
    """

    __slots__ = ("examples", "index")

    def __init__(self, index: int, examples: Sequence[Question | Conversation]) -> None:
        self.index = index
        self.examples = examples

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Batch) and (self.index, self.examples) == (other.index, other.examples)

    def __hash__(self) -> int:
        return hash((self.index, tuple(self.examples)))

    def __repr__(self) -> str:
        return f"Batch(index={self.index}, examples={len(self.examples)})"
