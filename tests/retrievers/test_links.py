from __future__ import annotations

from pathlib import Path

from refragkit.retrievers.links import LinkGraph, TitleIndex
from refragkit.types import Document


def titles(*names: str) -> TitleIndex:
    return TitleIndex([Document(str(i), name, "") for i, name in enumerate(names)])


def test_the_longest_title_wins_and_order_is_that_of_the_text() -> None:
    index = titles("New York", "New York City", "York")
    assert index.mentions("From York to New York City and New York.") == [2, 1, 0]


def test_qualifiers_case_and_accents_do_not_matter() -> None:
    index = titles("Mercury (planet)", "Émile Zola", "The Silence of the Lambs")
    assert index.mentions("EMILE ZOLA never saw the planet Mercury.") == [1, 0]
    assert index.mentions("It is called The Silence Of The Lambs") == [2]


def test_words_that_are_not_names_are_not_mentions() -> None:
    index = titles("Chess", "It", "Her", "Go")
    assert index.mentions("it is a game of chess, her game: go on") == []
    assert index.mentions("It is Her") == []
    assert index.mentions("They play Chess") == [0]


def test_whole_words_only() -> None:
    assert titles("Art", "Rome").mentions("Artists in Romeo and Juliet") == []


def test_several_documents_of_one_title_are_all_mentioned() -> None:
    assert titles("Paris", "Paris (Texas)", "London").mentions("born in Paris") == [0, 1]


def test_the_graph_excludes_itself_and_comes_back_from_the_cache(
    corpus: list[Document], tmp_path: Path
) -> None:
    index = TitleIndex(corpus)
    built = LinkGraph.build(corpus, index)
    ids = [d.doc_id for d in corpus]
    assert [ids[j] for j in built[ids.index("film_a")]] == ["dir_a"]
    assert [ids[j] for j in built[ids.index("sweden")]] == ["capital"]
    LinkGraph.open(corpus, "hash", index, tmp_path)
    again = LinkGraph.open(corpus, "hash", index, tmp_path)
    assert [again[i] for i in range(len(corpus))] == [built[i] for i in range(len(corpus))]
