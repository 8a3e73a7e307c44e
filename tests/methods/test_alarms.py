"""Alarms: on when something stays wrong, off when it recovers, said once."""

from __future__ import annotations

import logging
import re

import pytest

from refragkit.methods.alarms import Alarms


def healthy(**changes: float) -> dict[str, float]:
    names = {
        "reward": "reward/total",
        "entropy": "rollouts/entropy",
        "equal": "rollouts/equal_reward_groups",
        "empty": "reward/empty_completions",
        "cut": "rollouts/truncated",
        "silent": "rollouts/without_search",
    }
    values = {"reward": 0.5, "entropy": 2.0, "equal": 0.2, "empty": 0.0, "cut": 0.1, "silent": 0.3} | changes
    return {names[key]: value for key, value in values.items()}


WRONG = [
    ("zero_reward", {"reward": 0.0}, "every reward has been 0 for 4 steps"),
    ("equal_rewards", {"equal": 0.95}, "in 95% of the groups all rewards are equal"),
    ("reward_collapse", {"reward": 0.1}, r"fallen to 0\.\d+; its best was 0\.500"),
    ("entropy_collapse", {"entropy": 0.01}, r"nats per token, from 2\.000"),
    ("empty", {"empty": 0.8}, r"\d+% of the runs end without an answer"),
    ("truncated", {"cut": 0.9}, "have a turn that ran out of tokens"),
    ("stopped_searching", {"silent": 1.0}, "search no more"),
]


@pytest.mark.parametrize(("name", "changes", "message"), WRONG, ids=[w[0] for w in WRONG])
def test_each_alarm_comes_once_and_goes(
    name: str, changes: dict[str, float], message: str, caplog: pytest.LogCaptureFixture
) -> None:
    alarms = Alarms(window=4)
    with caplog.at_level(logging.WARNING, "refragkit"):
        for _ in range(4):
            assert not any(alarms.watch(healthy()).values())
        assert alarms.watch(healthy(**changes))[f"alarm/{name}"] == 0  # one odd step is nothing
        for _ in range(8):
            result = alarms.watch(healthy(**changes))
        assert result[f"alarm/{name}"] == 1
        said = [r.message for r in caplog.records if f"alarm {name}:" in r.message]
        assert len(said) == 1
        assert re.search(message, said[0])
        for _ in range(8):
            result = alarms.watch(healthy())
        assert not any(result.values())
        for _ in range(4):
            alarms.watch(healthy(**changes))
    assert sum(f"alarm {name}:" in r.message for r in caplog.records) == 2


def test_only_what_is_measured_is_watched() -> None:
    alarms = Alarms(window=2)
    assert set(alarms.watch({"reward/total": 0.4, "train/loss": 1.0})) == {
        "alarm/zero_reward",
        "alarm/reward_collapse",
    }
    assert alarms.watch({}) == {}


def test_a_reward_near_nothing_cannot_collapse() -> None:
    alarms = Alarms(window=2)
    for reward in (0.04, 0.04, 0.001, 0.001, 0.001):
        result = alarms.watch(healthy(reward=reward))
    assert result["alarm/reward_collapse"] == 0


def test_a_resumed_run_says_what_an_uninterrupted_one_would(caplog: pytest.LogCaptureFixture) -> None:
    steps = [healthy()] * 5 + [healthy(reward=0.1, entropy=0.001)] * 5
    whole, first = Alarms(window=4), Alarms(window=4)
    expected = [whole.watch(m) for m in steps]
    found = [first.watch(m) for m in steps[:6]]
    second = Alarms(window=4)
    second.load_state_dict(first.state_dict())
    found += [second.watch(m) for m in steps[6:]]
    assert found == expected
    assert (
        sum("alarm reward_collapse" in r.message for r in caplog.records) == 2
    )  # one for each of the two ways
