"""Every option in conf/reward, what each part pays for, and the ways in which a model could try to cheat."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.utils import get_object, instantiate
from hypothesis import given, settings
from hypothesis import strategies as st

from refragkit.errors import ConfigError
from refragkit.rewards.answer import AnswerReward, exact_match, normalize_answer, token_f1, without_question
from refragkit.rewards.base import Reward
from refragkit.rewards.composite import CompositeReward
from refragkit.rewards.efficiency import EfficiencyReward, economy
from refragkit.rewards.refrag import RefragReward
from refragkit.rewards.relevance import RelevanceReward, support_precision, support_recall
from refragkit.types import Document, Episode, Hit, Hop

CONF = Path(__file__).parents[2] / "conf"
OPTIONS = sorted(p.stem for p in (CONF / "reward").glob("*.yaml"))
TEXTS = {
    "g1": "Silent Harbour was directed by Marta Lindqvist.",
    "g2": "Marta Lindqvist was born in Sweden.",
    "n1": "Oolong is a tea.",
    "n2": "Chess is a game.",
}
QUESTION = "Who was born later, Marta Lindqvist or Paul Oduya?"


def hops(*ids: Sequence[str]) -> tuple[Hop, ...]:
    made = []
    for number, found in enumerate(ids, 1):
        hits = tuple(Hit(Document(i, "", TEXTS[i]), 1.0) for i in found)
        made.append(Hop(number, f"query {number}", hits, hits))
    return tuple(made)


def episode(completion: str, found: Sequence[Sequence[str]] = (["g1"], ["g2"]), **changes: object) -> Episode:
    values: dict[str, object] = {
        "question": QUESTION,
        "answers": ("Marta Lindqvist", "Lindqvist"),
        "supporting_ids": ("g1", "g2"),
        "hops": hops(*found),
        "completion": completion,
        "max_hops": 3,
    }
    return Episode(**{**values, **changes})  # type: ignore[arg-type]


def build(option: str, overrides: Sequence[str] = ()) -> Reward:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        node = compose(f"reward/{option}", list(overrides)).reward
    return instantiate(node, _convert_="all")


# --- the contract, over conf/reward -----------------------------------------------------------------------


@pytest.mark.parametrize("option", OPTIONS)
def test_the_file_opens_with_its_description_and_its_command(option: str) -> None:
    first, second = (CONF / "reward" / f"{option}.yaml").read_text(encoding="utf-8").splitlines()[:2]
    assert first.startswith("# ") and len(first) > 10
    assert second.startswith("# python run.py ") and f"reward={option}" in second


@pytest.mark.parametrize("option", OPTIONS)
def test_keys_are_the_signature(option: str) -> None:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        node = compose(f"reward/{option}").reward
    assert set(node) - {"_target_"} == set(inspect.signature(get_object(node._target_)).parameters)


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("empty", ["", " ", "\n\t  ", "\u200b", "...", "?!", "\u00a0"])
def test_saying_nothing_earns_nothing(option: str, empty: str) -> None:
    reward = build(option)
    assert reward([episode(empty)]) == [0.0]
    if isinstance(reward, CompositeReward):
        assert all(values == [0.0] for values in reward.parts([episode(empty)]).values())


@pytest.mark.parametrize("option", OPTIONS)
def test_rewards_are_per_episode_and_in_range(option: str) -> None:
    reward = build(option)
    episodes = [
        episode("Marta Lindqvist"),
        episode(""),
        episode("Paul"),
        episode("x" * 100_000),
        episode("Lindqvist " * 5000),
        episode("Lindqvist", []),
        episode("Lindqvist", [["n1", "n2"]], answers=()),
    ]
    together = reward(episodes)
    assert len(together) == len(episodes) and all(0 <= v <= 1 for v in together)
    assert together == [reward([e])[0] for e in episodes]
    assert reward([]) == []


@pytest.mark.parametrize("option", OPTIONS)
def test_the_right_answer_beats_every_cheat(option: str) -> None:
    reward = build(option)
    context = " ".join(TEXTS.values())
    honest, *cheats = reward(
        [
            episode("Marta Lindqvist"),
            episode(context),  # the whole context pasted
            episode(context * 200),  # endless text
            episode(QUESTION),  # the question, which names both candidates
            episode(QUESTION * 3),
            episode("Marta Lindqvist or Paul Oduya"),  # both candidates
            episode("yes no Marta Paul"),
            episode("I don't know."),  # the answer is in the retrieved text only
            episode("Document: [g1] [g2] score 1.0"),
        ]
    )
    assert honest == 1.0 if option in ("answer_f1", "exact_match") else honest > 0.9
    assert max(cheats) < honest - 0.2


# --- answer -----------------------------------------------------------------------------------------------


def test_squad_normalisation() -> None:
    assert normalize_answer("The  Beatles' (best) album, a-ha!") == "beatles best album aha"
    assert normalize_answer("An apple; the pear.") == "apple pear"


@settings(max_examples=60, deadline=None)
@given(
    st.text(alphabet="abc theAN.,'-12 é", max_size=30),
    st.lists(st.text(alphabet="abc theAN.,'-12 é", min_size=1, max_size=20), min_size=1, max_size=3),
)
def test_agrees_with_torchmetrics_squad(prediction: str, answers: list[str]) -> None:
    from torchmetrics.functional.text import squad

    # The two differ on purpose where the prediction is empty or nothing is left of an answer.
    if not normalize_answer(prediction) or not all(normalize_answer(a) for a in answers):
        return
    target = [{"answers": {"answer_start": [0] * len(answers), "text": answers}, "id": "x"}]
    reference = squad([{"prediction_text": prediction, "id": "x"}], target)
    assert token_f1(prediction, answers) == pytest.approx(float(reference["f1"]) / 100, abs=1e-6)
    assert exact_match(prediction, answers) == pytest.approx(float(reference["exact_match"]) / 100)


def test_aliases_count_by_the_best() -> None:
    assert token_f1("Lindqvist", ("Marta Lindqvist", "Lindqvist")) == 1.0
    assert token_f1("Lindqvist", ("Marta Lindqvist",)) == pytest.approx(2 / 3)
    assert exact_match("the LINDQVIST.", ("Marta Lindqvist", "Lindqvist")) == 1.0
    assert exact_match("Lindqvist", ()) == token_f1("Lindqvist", ()) == 0.0


@pytest.mark.parametrize(
    ("said", "gold", "expected"),
    [
        ("yes", "yes", 1.0),
        ("Yes.", "yes", 1.0),
        ("yes no", "yes", 0.0),
        ("no", "yes", 0.0),
        ("yes", "yes they are", 0.0),
    ],
)
def test_yes_and_no_are_all_or_nothing(said: str, gold: str, expected: float) -> None:
    assert token_f1(said, (gold,)) == exact_match(said, (gold,)) == expected


def test_an_answer_of_articles_only_still_needs_an_answer() -> None:
    assert token_f1("the", ("The",)) == 1.0 and token_f1("a", ("The",)) == 0.0
    assert token_f1("", ("The",)) == exact_match(" ", ("The",)) == 0.0
    assert token_f1("the", ("Sweden",)) == 0.0


def test_repeating_the_question_is_ignored_not_punished() -> None:
    assert without_question("Sweden", QUESTION) == "Sweden"
    said = AnswerReward("em")(
        [episode(f"{QUESTION} Marta Lindqvist"), episode(QUESTION), episode("Marta Lindqvist")]
    )
    assert said == [1.0, 0.0, 1.0]
    assert without_question("capital", "capital?") == "capital"


# --- relevance --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("found", "recall", "precision", "f2"),
    [
        ([["g1", "g2"]], 1.0, 1.0, 1.0),
        ([["g1"], ["g2"]], 1.0, 1.0, 1.0),
        ([["g1", "n1"], ["g2", "n2"]], 1.0, 0.5, 5 * 0.5 / (4 * 0.5 + 1)),
        ([["g1"]], 0.5, 1.0, 5 * 0.5 / (4 * 1 + 0.5)),
        ([["n1", "n2"]], 0.0, 0.0, 0.0),
        ([], 0.0, 0.0, 0.0),
    ],
)
def test_relevance_is_f2_of_support(
    found: list[list[str]], recall: float, precision: float, f2: float
) -> None:
    e = episode("anything", found)
    assert (support_recall(e), support_precision(e)) == (recall, precision)
    assert RelevanceReward()([e]) == [pytest.approx(f2)]


def test_relevance_without_gold_is_the_cosine() -> None:
    about = "Silent Harbour was directed by whom?"
    episodes = [
        episode("x", [["g1"]], supporting_ids=(), question=about),
        episode("x", [["n1"]], supporting_ids=(), question=about),
        episode("x", [["g1", "n1"]], supporting_ids=(), question=about),
        episode("x", [], supporting_ids=(), question=about),
        episode("", [["g1"]], supporting_ids=(), question=about),
    ]
    good, bad, mixed, nothing, unsaid = RelevanceReward()(episodes)
    assert good > 0.5 > 0.2 > bad >= 0
    assert mixed == pytest.approx((good + bad) / 2, abs=1e-5)
    assert nothing == unsaid == 0.0


# --- efficiency -------------------------------------------------------------------------------------------


def test_fewer_hops_and_documents_earn_more_for_the_same_answer() -> None:
    said = [
        episode("Lindqvist", [["g1", "g2"]]),
        episode("Lindqvist", [["g1"], ["g2"]]),
        episode("Lindqvist", [["g1", "n1"], ["g2"]]),
        episode("Lindqvist", [["g1", "n1"], ["g2"], ["n2"]]),
    ]
    values = EfficiencyReward()(said)
    assert values == sorted(values, reverse=True) and len(set(values)) == 4
    assert values[0] == 1.0 and values[-1] > 0


def test_retrieving_nothing_or_answering_wrongly_is_never_efficient() -> None:
    said = [episode("Lindqvist", []), episode("Lindqvist", [[]]), episode("Sweden", [["g1"]])]
    assert EfficiencyReward()(said) == [0.0, 0.0, 0.0]
    assert economy(said[0]) == economy(said[1]) == 0.0


# --- the sum ----------------------------------------------------------------------------------------------


def test_refrag_is_the_weighted_sum_of_its_parts() -> None:
    reward = RefragReward()
    episodes = [episode("Lindqvist"), episode("Marta"), episode(""), episode("Sweden", [["n1"]])]
    parts = reward.parts(episodes)
    assert list(parts) == ["answer", "relevance", "efficiency"]
    expected = [
        0.6 * a + 0.3 * r + 0.1 * e
        for a, r, e in zip(parts["answer"], parts["relevance"], parts["efficiency"], strict=True)
    ]
    assert reward(episodes) == pytest.approx(expected)
    assert reward.combine(parts) == pytest.approx(expected)


def test_weights_are_overridable_and_stay_in_range() -> None:
    best = episode("Lindqvist", [["g1", "g2"]])
    assert build("refrag", ["reward.weights.answer=1"])([best]) == [1.0]
    only = build("refrag", ["reward.weights.relevance=0", "reward.weights.efficiency=0"])
    assert only([episode("Lindqvist", [["n1"]])]) == [1.0]


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"answer": 1.0, "relevance": 1.0}, r"expected the keys \['answer', 'efficiency', 'relevance'\]"),
        (
            {"answer": -1.0, "relevance": 1.0, "efficiency": 1.0},
            r"weights.answer: expected a number >= 0, got -1",
        ),
        ({"answer": 0.0, "relevance": 0.0, "efficiency": 0.0}, r"must be above 0"),
    ],
)
def test_bad_weights_are_refused(weights: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RefragReward(weights)


def test_a_reward_out_of_range_is_caught() -> None:
    class Broken(Reward):
        def score(self, episodes: Sequence[Episode]) -> list[float]:
            return [float("nan") for _ in episodes]

    with pytest.raises(ValueError, match="got nan"):
        Broken()([episode("x")])
    with pytest.raises(ConfigError, match=r"expected metric f1 or em, got 'bleu'"):
        AnswerReward("bleu")
    with pytest.raises(ConfigError, match=r"beta > 0, got 0"):
        RelevanceReward(beta=0)
