"""Which samples of a prompt are learnt: good enough, each said once, the best or a control.

Source: Yuan et al. 2023 (arXiv 2308.01825), section 3.3: every right answer with a list of equations of its own
(``all_correct``). ``best`` and ``best_overall`` are rejection sampling by rank, as in Dong et al. 2023 (arXiv
2304.06767).
"""

from __future__ import annotations

import random
import unicodedata
from collections.abc import Hashable, Sequence
from typing import Literal

from refragkit.methods.equations import equation_list, equations_hold
from refragkit.methods.rollout_file import Sample, SampledPrompt
from refragkit.rewards.numeric import final_number

Selection = Literal["best", "random", "best_overall", "all_correct", "recorded"]
DistinctBy = Literal["equations", "text"]


def distinct_key(text: str, by: DistinctBy) -> Hashable:
    """What two samples have in common when they say the same.

    ``text``: the text itself but for case, white space and closing punctuation. ``equations``: the list of equations
    and the final number, in whatever words; the text where it has no equation.
    """
    if by == "equations" and (equations := equation_list(text)):
        return (*equations, final_number(text))
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split()).rstrip(" .,;:!?")


def mark(rollout: SampledPrompt, min_reward: float, distinct_by: DistinctBy, check_equations: bool) -> None:
    """Mark which samples are accepted, and which say what no earlier one does.

    Args:
        rollout: its samples are changed.
        min_reward: of an accepted sample.
        distinct_by: see `distinct_key`.
        check_equations: accept none whose equations are wrong.
    """
    seen: dict[bool, set[Hashable]] = {True: set(), False: set()}
    for sample in rollout.samples:
        right = not check_equations or equations_hold(sample.text)
        sample.accepted = sample.reward >= min_reward and right
        # Among their equals only: a good sample must not be lost to a bad one that calculates the same.
        key = distinct_key(sample.text, distinct_by)
        sample.distinct = key not in seen[sample.accepted]
        seen[sample.accepted].add(key)


def select(rollouts: Sequence[SampledPrompt], selection: Selection, top_k: int, seed: int) -> None:
    """Mark which samples are kept.

    ``best``: of each prompt the ``top_k`` best of its accepted and distinct samples. ``best_overall``: as many for all
    prompts together, wherever they come from. ``all_correct``: all accepted and distinct samples. ``random``, the
    control: of each prompt as many as ``best`` keeps, drawn from all distinct samples whatever they earned.
    ``recorded``: as they are marked. Of equal rewards, the one sampled first is better.

    Args:
        rollouts: marked by `mark`; their samples are changed.
        selection: the rule.
        top_k: samples kept of a prompt, at most.
        seed: of ``random``.
    """
    if selection == "recorded":
        return
    candidates = [[s for s in r.samples if s.accepted and s.distinct] for r in rollouts]
    if selection == "all_correct":
        kept = [s for group in candidates for s in group]
    elif selection == "best_overall":
        kept = _best([s for group in candidates for s in group], top_k * len(rollouts))
    elif selection == "best":
        kept = [s for group in candidates for s in _best(group, top_k)]
    else:
        draw = random.Random(seed)
        kept = []
        for rollout, group in zip(rollouts, candidates, strict=True):
            distinct = [s for s in rollout.samples if s.distinct]
            kept += draw.sample(distinct, min(len(group), top_k))
    chosen = {id(s) for s in kept}
    for rollout in rollouts:
        for sample in rollout.samples:
            sample.kept = id(sample) in chosen


def _best(samples: Sequence[Sample], n: int) -> list[Sample]:
    return sorted(samples, key=lambda s: -s.reward)[:n]
