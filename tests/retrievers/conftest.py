from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from omegaconf import DictConfig

from refragkit.retrievers.multi_hop import MultiHopRetriever
from refragkit.types import Document, Question

CONF = Path(__file__).parents[2] / "conf"
OPTIONS = sorted(p.stem for p in (CONF / "retriever").glob("*.yaml"))


def retriever_node(option: str, overrides: Sequence[str] = ()) -> DictConfig:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose(f"retriever/{option}", list(overrides)).retriever


def require_milvus() -> tuple[bool, str]:
    """Whether to skip tests of Milvus, and why."""
    missing = [m for m in ("pymilvus", "milvus_lite") if importlib.util.find_spec(m) is None]
    return bool(missing), f"{' and '.join(missing)} not installed: pip install 'refragkit[milvus]'"


def build(option: str, cache_dir: Path | None = None, overrides: Sequence[str] = ()) -> MultiHopRetriever:
    if option == "milvus" and (skip := require_milvus())[0]:
        pytest.skip(skip[1])
    return instantiate(retriever_node(option, overrides), cache_dir=cache_dir)


@pytest.fixture(scope="session")
def corpus() -> list[Document]:
    """A small linked corpus: films, their directors, the directors' countries, and passages about none of it."""
    rows = [
        ("film_a", "Silent Harbour", "Silent Harbour is a 1961 drama film directed by Marta Lindqvist."),
        ("film_b", "The Glass Orchard", "The Glass Orchard is a comedy film directed by Paul Oduya."),
        ("dir_a", "Marta Lindqvist", "Marta Lindqvist (1920-1999) was a film maker born in Sweden."),
        ("dir_b", "Paul Oduya", "Paul Oduya is a stage and film director from Kenya."),
        ("sweden", "Sweden", "Sweden is a country in northern Europe. Its capital is Stockholm."),
        ("kenya", "Kenya", "Kenya is a country in eastern Africa. Its capital is Nairobi."),
        ("capital", "Stockholm", "Stockholm is a city on fourteen islands."),
        ("bread", "Sourdough", "Sourdough is bread leavened by wild yeast and bacteria."),
        ("tea", "Oolong", "Oolong is a semi-oxidised tea grown on mountain slopes."),
        ("chess", "Chess opening", "The opening is the first stage of a chess game."),
        ("river", "Delta (river mouth)", "A delta forms where a river drops its sediment."),
        ("moss", "Sphagnum", "Sphagnum mosses store water and build peat."),
    ]
    return [Document(i, title, text, {"source": f"test:{i}"}) for i, title, text in rows]


@pytest.fixture(scope="session")
def questions() -> list[Question]:
    return [
        Question(
            "q1",
            "In which country was the director of Silent Harbour born?",
            ("Sweden",),
            ("film_a", "dir_a"),
            2,
        ),
        Question(
            "q2",
            "Which country is the director of The Glass Orchard from?",
            ("Kenya",),
            ("film_b", "dir_b"),
            2,
        ),
        Question("q3", "What leavens sourdough?", ("wild yeast",), ("bread",), 1),
    ]


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One cache for the session, so that the encoder loads once and encodes each text once."""
    return tmp_path_factory.mktemp("cache")
