"""Turning attention blocks of a pretrained model into recurrent ones.

`blocks` replaces mixers, `from_attention` gives them their first weights, `calibrate` fits what can be fitted in closed
form, `align` and `match` train them on what the teacher does, `sensitivity` finds blocks that a model can spare,
`evaluate` measures what a conversion cost.

Source: Mamba in the Llama (Wang et al. 2024, arXiv 2408.15237) for starting from q, k, v and o; MOHAWK (Bick et al.
2024, arXiv 2408.10189) for matching each mixer on the teacher's inputs; RADLADS (Goldstein et al. 2025, arXiv
2505.03005) and ARWKV (Yueyu et al. 2025, arXiv 2501.15570) for RWKV-7 in place of attention.
Differs: a least-squares fit stands before any training; blocks are chosen by perplexity and an induction probe.
"""

from refragkit.models.convert.activations import run_mixer, teacher_activations
from refragkit.models.convert.blocks import convert_blocks, converted_config
from refragkit.models.convert.calibrate import CalibrationReport, calibrate

__all__ = [
    "CalibrationReport",
    "calibrate",
    "convert_blocks",
    "converted_config",
    "run_mixer",
    "teacher_activations",
]
