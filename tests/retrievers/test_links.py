from __future__ import annotations

from pathlib import Path

import numpy as np

from refragkit.retrievers.links import TitleIndex
from refragkit.retrievers.passage_graph import PassageGraph, Rows, RowsBuilder
from refragkit.types import Document


def titles(*names: str) -> TitleIndex:
    return TitleIndex(names)


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


def names(graph: PassageGraph, corpus: list[Document], rows: Rows, doc_id: str) -> list[str]:
    return [corpus[j].doc_id for j in rows[[d.doc_id for d in corpus].index(doc_id)]]


def test_the_graph_has_links_both_ways_and_excludes_itself(corpus: list[Document]) -> None:
    graph = PassageGraph.build(corpus)
    assert names(graph, corpus, graph.links, "film_a") == ["dir_a"]
    assert names(graph, corpus, graph.links, "sweden") == ["capital"]
    assert names(graph, corpus, graph.backlinks, "dir_a") == ["film_a"]
    assert names(graph, corpus, graph.backlinks, "bread") == []
    assert graph.has_links


def test_a_link_knows_where_and_in_which_words(corpus: list[Document]) -> None:
    graph = PassageGraph.build(corpus)
    stems = {i: s for s, i in graph.vocabulary.items()}
    link = int(graph.links.starts[[d.doc_id for d in corpus].index("film_a")])
    assert graph.link_position[link] == 9  # the tenth word of its text
    assert {stems[int(t)] for t in graph.contexts[link]} >= {"drama", "film", "direct"}


def test_rare_terms_weigh_more_and_names_are_marked(corpus: list[Document]) -> None:
    graph = PassageGraph.build(corpus)
    assert graph.idf[graph.vocabulary["sourdough"]] > graph.idf[graph.vocabulary["film"]]
    span = slice(*graph.terms.starts[2:4])
    marked = {int(t) for t, n in zip(graph.terms.values[span], graph.is_name[span], strict=True) if n}
    assert {graph.vocabulary[s] for s in ("marta", "lindqvist", "sweden", "1920", "1999")} == marked
    assert graph.term_ids("sourdough sourdough unheardof")[0] == [graph.vocabulary["sourdough"]]
    assert graph.term_ids("sourdough unheardof")[1] == 1


def test_the_graph_comes_back_from_the_cache(corpus: list[Document], tmp_path: Path) -> None:
    built = PassageGraph.build(corpus)
    PassageGraph.open(corpus, "hash", tmp_path)
    again = PassageGraph.open(corpus, "hash", tmp_path)
    assert again.vocabulary == built.vocabulary
    assert all(np.array_equal(again.tensors[k], v) for k, v in built.tensors.items())


def test_rows_of_different_lengths() -> None:
    builder = RowsBuilder()
    for row in ([1, 2], [], [3], [4, 5, 6]):
        builder.append(row)
    rows = builder.rows()
    indices, numbers = rows.span(np.array([3, 1, 0]))
    assert rows.values[indices].tolist() == [4, 5, 6, 1, 2] and numbers.tolist() == [0, 0, 0, 2, 2]
    assert rows[1].tolist() == [] and len(rows) == 4
