"""The final number of GSM8K-style answers: real graded solutions, spellings, and what is no answer."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from refragkit import compose
from refragkit.config import instantiate
from refragkit.errors import ConfigError
from refragkit.rewards.numeric import NumericReward, final_number
from refragkit.types import Episode

SHARED = Path(__file__).parents[3] / "shared" / "data" / "gsm8k"

# Real sampled solutions with the labels that came with them (openai/grade-school-math, MIT)
GRADED = [
    ("It takes 2*1/2=<<2*1/2=1.0>>1 bolt of white fiber\nSo it takes 2+1=<<2+1=3>>3 bolts of blue and white "
     "fiber\nA: 3", "3", True),
    ("It takes 2 x 0.5 = <<2*0.5=1.0>>1.0 bolts of white fiber.\nSo it takes 2 + 1 = <<2+1=3>>3.0 bolts of blue "
     "and white fiber altogether.\nA: 3", "3", True),
    ("Let x be the cost of the house.\nThe lot cost 120,000/3=<<120,000/3=40,000>>40,000.\nSo the house cost "
     "120,000+40,000=<<120,000+40,000=160,000>>160,000.\nA: 160,000", "90000", False),
    ("The pool is 6*4=<<6*4=24>>24 cubic feet\nSo it cost 24*.1=$<<24*.1=2.4000000000000004>>2.4 to fill\nA: 2.4",
     "12", False),
    ("The total ratio of men and women on the bus is 5+9 = <<5+9=14>>14\nThe fraction that represents the number of "
     "women on the bus is 9/14, and since 20 women alighted, the number of women remaining is 9/14-20 = 7/14\n"
     "A: 7/14", "34", False),
    ("The age of Paul is 10 years more than John's age so Paul is 10+John's age\nThe age of Peter is the sum of Paul "
     "and John's age so Peter is 10+John's age\nA: 10+John's age", "50", False),
    ("He drives 75*2=<<75*2=150>>150 miles\nSo he is gone 150-75=<<150-75=75>>75 miles\nThat means he is gone for "
     "6/75=<<6/75=0.08>>0.08 hours\nA: 0.08", "10", False),
]  # fmt: skip


def test_it_agrees_with_the_labels_of_real_solutions() -> None:
    episodes = [Episode("?", (gold,), completion=text) for text, gold, _ in GRADED]
    assert [bool(r) for r in NumericReward()(episodes)] == [label for *_, label in GRADED]


@pytest.mark.skipif(not SHARED.is_dir(), reason="the shared data are not here")
def test_it_agrees_with_all_graded_solutions() -> None:
    episodes, labels = [], []
    for line in (SHARED / "model_solutions.jsonl").read_bytes().splitlines():
        row = json.loads(line)
        for solution in row["solutions"]:
            episodes.append(Episode(row["question"], (row["final_answer"],), completion=solution["solution"]))
            labels.append(solution["is_correct"])
    rewards = NumericReward()(episodes)
    agreeing = sum(bool(r) == label for r, label in zip(rewards, labels, strict=True))
    assert len(labels) == 4220
    assert agreeing / len(labels) >= 0.999


@pytest.mark.skipif(not SHARED.is_dir(), reason="the shared data are not here")
@pytest.mark.parametrize("file", ["train.jsonl", "test.jsonl"])
def test_it_reads_every_gold_answer(file: str) -> None:
    for line in (SHARED / file).read_bytes().splitlines():
        row = json.loads(line)
        assert (
            final_number(row["answer"]) == final_number(row["final_answer"]) == Fraction(row["final_answer"])
        )


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("48/2 = <<48/2=24>>24 clips\n#### 72", "72"),
        ("#### $1,080.00", "1080"),
        (r"so \boxed{\$1{,}080}.", "1080"),
        (r"She has \(\boxed{18}\) eggs left of 21.", "18"),
        (r"\boxed{\dfrac{1}{2}}", "1/2"),
        (r"\boxed{x = 5}", "5"),
        ("A: 80,000", "80000"),
        ("**Answer:** 72 clips in 2 months", "72"),
        ("Answer:\n\n72", "72"),
        ("The answer is: **72**.", "72"),
        ("The final answer is 5 + 3 = 8 apples", "8"),
        ("It was 5, then it was 7.", "7"),
        ("That makes 50%", "50"),
        ("-$5", "-5"),
        ("$-5", "-5"),
        ("the temperature is −7 degrees", "-7"),
        ("10-3", "3"),
        ("12 - 4 = 8", "8"),
        ("2 1/2 hours", "5/2"),
        ("7 / 14", "1/2"),
        ("1.5e3", "1500"),
        (".5 miles", "1/2"),
        ("3.0", "3"),
        ("1000km", "1000"),
        ("12,34", "34"),  # a list, not thousands
        ("on 3/4/2020", "3"),  # a date is no fraction
        ("#### 5\nThe answer is 6", "6"),  # the last word counts
    ],
)  # fmt: skip
def test_spellings(text: str, number: str) -> None:
    assert final_number(text) == Fraction(number)


@pytest.mark.parametrize(
    "text", ["", "no idea", "H2O", "5 + 5 = 10\nA: ten", "3 + 4 = 7\n#### ", r"7 \boxed{}", "answer is 1/0"]
)
def test_what_arrives_at_no_number(text: str) -> None:
    assert final_number(text) is None


@settings(max_examples=100, deadline=None)
@given(
    st.integers(-(10**9), 10**9),
    st.sampled_from(["{}", "${}", "{} dollars", "{}.00", "**{}**", "{}."]),
    st.booleans(),
    st.sampled_from(["#### {}", r"\boxed{{{}}}", "The answer is {}", "A: {}", "that is {}"]),
)
def test_units_and_signs_do_not_change_a_number(number: int, unit: str, commas: bool, sign: str) -> None:
    spelt = unit.format(f"{number:,}" if commas else number)
    assert final_number("First 17 + 4 = 21.\n" + sign.format(spelt)) == number


@pytest.mark.parametrize(
    "text", ["1" * 100_000, "1,000" * 20_000, "-" * 100_000, "A: " * 30_000, "1/" * 50_000]
)
def test_endless_text_is_read_quickly(text: str) -> None:
    assert NumericReward()([Episode("?", ("5",), completion=text)]) == [0.0]


def test_close_is_equal_within_the_tolerance() -> None:
    third = Episode("?", ("1/3",), completion="0.3333333")
    assert NumericReward()([third]) == [1.0]
    assert NumericReward(tolerance=0)([third]) == [0.0]
    assert NumericReward()([Episode("?", ("92",), completion="A: 92.16")]) == [0.0]
    assert NumericReward()([Episode("?", ("0",), completion="0.0")]) == [1.0]


def test_an_answer_without_a_number_is_compared_as_words() -> None:
    yes = ("yes",)
    assert NumericReward()([Episode("?", yes, completion="Yes."), Episode("?", yes, completion="no")]) == [
        1,
        0,
    ]
    both = ("twelve", "12")
    assert NumericReward()([Episode("?", both, completion=c) for c in ("Twelve", "it is 12", "13")]) == [
        1,
        1,
        0,
    ]


def test_the_option_builds_it_and_refuses_nonsense() -> None:
    assert isinstance(instantiate(compose(["reward=numeric"]), "reward"), NumericReward)
    with pytest.raises(ConfigError, match=r"reward\.tolerance: expected a number in \[0, 1\), got 1"):
        instantiate(compose(["reward=numeric", "reward.tolerance=1"]), "reward")
