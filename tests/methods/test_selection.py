"""Equations, distinct samples and selection, against what a reader would do by hand."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from refragkit.data.gsm8k import GSM8K
from refragkit.methods.equations import equation_list, equations_hold
from refragkit.methods.pass_at_k import mean_pass_at_k, pass_at_k
from refragkit.methods.rollout_file import Sample, SampledPrompt
from refragkit.methods.selection import distinct_key, mark, select


def prompt(*samples: tuple[str, float]) -> SampledPrompt:
    return SampledPrompt("q", "?", ("1",), [1, 2], [Sample(t, [5], True, {"total": r}) for t, r in samples])


def kept(rollout: SampledPrompt) -> list[str]:
    return [s.text for s in rollout.kept]


# --- equations ------------------------------------------------------------------------------------------


def test_equations_are_read_from_annotations_and_otherwise_from_the_text() -> None:
    annotated = "She sold 48/2 = <<48/2=24.0>>24 in May.\nThat is 48 + 24 = $<<48+24=72>>72.\n#### 72"
    assert equation_list(annotated) == ("48/2=24", "48+24=72")
    assert equation_list("So $1,200 / 4 = $300.00, then 3 x 2 = 6 and 5 apples.") == ("1200/4=300", "3*2=6")
    assert equation_list("The answer is Paris, in 1990.") == ()


def test_the_equations_of_the_bundled_sample_hold() -> None:
    data = GSM8K()
    data.prepare()
    annotated = [q.answers[0] for q in data.train if "<<" in q.answers[0]]
    assert len(annotated) > 0.97 * len(data.train)
    assert all(equations_hold(a) and equation_list(a) for a in annotated)


@pytest.mark.parametrize(
    ("annotation", "holds"),
    [
        ("48/2=24", True),
        ("48/2=25", False),
        ("10/3=3.33", True),
        ("10/3=3", True),  # rounded to a whole number
        ("5+5=11", False),
        ("20%*50=10", True),
        ("1,000*2=2,000", True),
        ("-3+5=2", True),
        ("2*(3+4)=14", True),
        ("7//2=3", True),
        ("2**10=1024", True),
        ("1+1=2=2", True),
        ("05+1=6", True),
        ("x+1=2", False),
        ("1/0=1", False),
        ("=", False),
        ("__import__('os').getpid()=1", False),
        ("9**99**9=1", False),
        ("(" * 190 + "=1", False),
    ],
)  # fmt: skip
def test_equations_hold(annotation: str, holds: bool) -> None:
    assert equations_hold(f"so <<{annotation}>> it is") is holds
    assert equations_hold("nothing was calculated")


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("2+7=6\n#### 6", False),
        ("2 + 7 = $9.00, so 9 * 2 = 18", True),
        ("2 + 7 = 9, so 9 * 2 = 19", False),
        ("(10/20)*100 = 50%", True),
        ("20% x 50 = 10", True),
        ("1,000 / 3 = 333.33", True),
        ("x + 5 - 3 = 10", True),  # an equation with an unknown
        ("5 / 2 = 2 1/2", True),
        ("10 - 2 = 4 * 2", True),
        ("<<2+7=9>>, 1 + 1 = 3", True),  # annotations are what counts, where there are any
        ("in 1990, A = 5", True),
    ],
)
def test_sums_of_a_text_without_annotations(text: str, holds: bool) -> None:
    assert equations_hold(text) is holds


def test_few_gold_answers_are_lost_without_their_annotations() -> None:
    data = GSM8K(annotations=False)
    data.prepare()
    answers = [q.answers[0] for q in [*data.train, *data.validation]]
    assert sum(equations_hold(a) for a in answers) >= 0.99 * len(answers)


@settings(max_examples=200, deadline=None)
@given(st.recursive(st.integers(0, 99).map(str), lambda inner: st.tuples(inner, st.sampled_from("+-*"), inner).map(
    lambda parts: f"({parts[0]}{parts[1]}{parts[2]})"), max_leaves=6))  # fmt: skip
def test_equations_hold_as_python_calculates(expression: str) -> None:
    value = eval(expression)
    assert equations_hold(f"<<{expression}={value}>>")
    assert not equations_hold(f"<<{expression}={value + 1}>>")


# --- distinct -------------------------------------------------------------------------------------------


def test_the_same_equations_in_other_words_are_the_same() -> None:
    one = "He has 3+4=<<3+4=7>>7 apples.\n#### 7"
    words = "Together, that makes 3 + 4 = <<3+4=7>>7.\n#### 7"
    order = "So 4+3=<<4+3=7>>7.\n#### 7"
    other = "So 3+4=<<3+4=7>>7.\n#### 8"  # the same sum, another answer
    keys = [distinct_key(t, "equations") for t in (one, words, order, other)]
    assert keys[0] == keys[1] and len(set(keys)) == 3
    assert len({distinct_key(t, "text") for t in (one, words, order, other)}) == 4


def test_text_is_compared_without_case_space_and_closing_punctuation() -> None:
    for by in ("equations", "text"):
        assert distinct_key("  The  Paris.", by) == distinct_key("the paris", by)
        assert distinct_key("1.5", by) != distinct_key("15", by)
        assert distinct_key("Paris, Texas", by) != distinct_key("Paris", by)


def test_mark_accepts_by_reward_and_by_its_equations() -> None:
    rollout = prompt(("a", 0.5), ("b", 0.49), ("1+1=<<1+1=3>>3", 1.0), ("A.", 1.0), ("b", 0.1))
    mark(rollout, 0.5, "equations", check_equations=True)
    assert [s.accepted for s in rollout.samples] == [True, False, False, True, False]
    assert [s.distinct for s in rollout.samples] == [True, True, True, False, False]
    mark(rollout, 0.5, "equations", check_equations=False)
    assert rollout.samples[2].accepted


def test_a_good_sample_is_not_lost_to_a_bad_one_that_says_the_same() -> None:
    rollout = prompt(("Paris", 0.0), ("paris", 1.0))
    mark(rollout, 0.5, "text", check_equations=True)
    select([rollout], "best", 1, seed=0)
    assert kept(rollout) == ["paris"]


# --- selection ------------------------------------------------------------------------------------------


def two_prompts() -> list[SampledPrompt]:
    rollouts = [
        prompt(("a", 0.6), ("b", 0.9), ("b", 0.9), ("c", 0.7), ("d", 0.1)),
        prompt(("e", 0.8), ("f", 0.2), ("g", 0.3), ("h", 0.0), ("i", 0.0)),
    ]
    for rollout in rollouts:
        mark(rollout, 0.5, "text", check_equations=True)
    return rollouts


@pytest.mark.parametrize(
    ("selection", "top_k", "expected"),
    [
        ("best", 1, [["b"], ["e"]]),
        ("best", 2, [["b", "c"], ["e"]]),
        ("best", 5, [["a", "b", "c"], ["e"]]),
        ("best_overall", 1, [["b"], ["e"]]),
        ("best_overall", 2, [["a", "b", "c"], ["e"]]),
        ("all_correct", 1, [["a", "b", "c"], ["e"]]),
    ],
)
def test_selection(selection: str, top_k: int, expected: list[list[str]]) -> None:
    rollouts = two_prompts()
    select(rollouts, selection, top_k, seed=0)  # type: ignore[arg-type]
    assert [kept(r) for r in rollouts] == expected


def test_best_overall_takes_from_where_the_best_are() -> None:
    rollouts = [prompt(("a", 0.9), ("b", 0.8)), prompt(("c", 0.6), ("d", 0.5))]
    for rollout in rollouts:
        mark(rollout, 0.5, "text", check_equations=True)
    select(rollouts, "best_overall", 1, seed=0)
    assert [kept(r) for r in rollouts] == [["a", "b"], []]


def test_random_keeps_as_many_as_best_whatever_they_earned() -> None:
    seen = set()
    for seed in range(200):
        rollouts = two_prompts()
        select(rollouts, "random", 2, seed)
        assert [len(r.kept) for r in rollouts] == [2, 1]
        assert all(s.distinct for r in rollouts for s in r.kept)
        seen.update(kept(rollouts[1]))
        again = two_prompts()
        select(again, "random", 2, seed)
        assert [kept(r) for r in again] == [kept(r) for r in rollouts]
    assert seen == {"e", "f", "g", "h", "i"}


def test_recorded_keeps_what_is_marked() -> None:
    rollouts = two_prompts()
    rollouts[0].samples[4].kept = True
    select(rollouts, "recorded", 1, seed=0)
    assert [kept(r) for r in rollouts] == [["d"], []]


def test_a_prompt_whose_samples_all_fail_keeps_none() -> None:
    for selection in ("best", "random", "best_overall", "all_correct"):
        rollout = prompt(("a", 0.4), ("b", 0.0))
        mark(rollout, 0.5, "text", check_equations=True)
        select([rollout], selection, 2, seed=0)  # type: ignore[arg-type]
        assert rollout.kept == []


# --- pass@k ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 4, 6])
def test_pass_at_k_is_the_share_of_all_groups_of_k_with_a_right_one(n: int) -> None:
    for correct, k in itertools.product(range(n + 1), range(1, n + 1)):
        samples = [True] * correct + [False] * (n - correct)
        groups = [any(group) for group in itertools.combinations(samples, k)]
        assert pass_at_k(n, correct, k) == pytest.approx(sum(groups) / len(groups))


def test_pass_at_k_is_unbiased() -> None:
    draw, p, n, k = random.Random(0), 0.3, 6, 2
    estimates = [pass_at_k(n, sum(draw.random() < p for _ in range(n)), k) for _ in range(20_000)]
    assert sum(estimates) / len(estimates) == pytest.approx(1 - (1 - p) ** k, abs=0.01)


def test_mean_pass_at_k_and_its_bounds() -> None:
    assert mean_pass_at_k(6, [0, 6]) == {1: 0.5, 2: 0.5, 4: 0.5, 6: 0.5}
    assert set(mean_pass_at_k(8, [1])) == {1, 2, 4, 8}
    assert mean_pass_at_k(1, [1, 0]) == {1: 0.5}
    for n, correct, k in ((4, 5, 1), (4, -1, 1), (4, 1, 5), (4, 1, 0)):
        with pytest.raises(ValueError, match="pass@k: expected"):
            pass_at_k(n, correct, k)
