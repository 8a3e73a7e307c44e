"""A compiled model against the same one in eager mode, in a process of its own: a crash ends only that.

    python tests/models/compiled_numbers.py BLOCK_PATTERN BACKEND CASE ...

Prints one line a case, and ends with status 1 where numbers differ.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from refragkit import build_model, compose
from refragkit.adapters.lora import LoRA
from refragkit.generation.engine import GenerationConfig, generate
from refragkit.models.base import SequenceModel

VOCAB = 64
SHAPE = ["model.d_model=48", "model.n_heads=4", "model.n_kv_heads=2", "model.head_dim=12", "model.d_ff=64"]
STATE = ["model.wkv_head_dim=16", "model.ssm_head_dim=16", "model.d_state=16"]
Models = dict[str, SequenceModel]


def tokens(batch: int, length: int) -> Tensor:
    return torch.randint(0, VOCAB, (batch, length), generator=torch.Generator().manual_seed(length))


def right_padded(batch: int, length: int) -> Tensor:
    mask = torch.ones(batch, length)
    mask[1, length - 9 :] = 0
    return mask


def difference(got: Tensor, wanted: Tensor, floor: float = 0.0) -> float:
    """Relative, of the vectors; ``floor`` for those that are zero but for rounding."""
    return float((got.double() - wanted.double()).norm() / (wanted.double().norm() + floor))


def train(models: Models, ids: Tensor, tolerance: float = 1e-5, **inputs: Tensor) -> float:
    """Logits, loss and every parameter's gradient."""
    results = []
    for model in models.values():
        model.zero_grad()
        torch.manual_seed(0)
        logits = model(ids, **inputs).logits
        loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())
        loss.backward()
        grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        results.append((logits.detach(), loss.detach(), grads))
    (logits, loss, grads), (other_logits, other_loss, other_grads) = results
    worst = max(difference(other_logits, logits), difference(other_loss, loss))
    assert grads and grads.keys() == other_grads.keys()
    norm = float(torch.stack([g.double().norm() for g in grads.values()]).norm())
    for name, grad in grads.items():
        apart = difference(other_grads[name], grad, floor=0.01 * norm)
        assert apart <= tolerance, f"{name}: {apart:.1e} of {float(grad.norm()):.1e} in {norm:.1e}"
        worst = max(worst, apart)
    assert worst <= tolerance, f"{worst:.1e}"
    return worst


def lengths(models: Models) -> float:
    """Other lengths and batch sizes need no further compilation."""
    worst = train(models, tokens(2, 40))
    before = compilations()
    for shape in ((2, 71), (3, 130), (4, 33)):
        worst = max(worst, train(models, tokens(*shape)))
    assert compilations() == before, f"{compilations() - before} compilations for other lengths"
    return worst


def padding(models: Models) -> float:
    return train(models, tokens(3, 50), attention_mask=right_padded(3, 50))


def packing(models: Models) -> float:
    segments = torch.ones(3, 50, dtype=torch.int64)
    segments[:, 20:] = 2
    segments[1, 45:] = 0
    return train(models, tokens(3, 50), segment_ids=segments)


def checkpointing(models: Models) -> float:
    for model in models.values():
        model.gradient_checkpointing = True  # type: ignore[assignment]
    return train(models, tokens(3, 50), attention_mask=right_padded(3, 50))


def autocast(models: Models) -> float:
    """bfloat16 rounds in other places; as far apart as eager bfloat16 and float32 are would be 1e-2."""
    with torch.autocast("cpu", torch.bfloat16):
        return train(models, tokens(2, 40), tolerance=2e-2)


def lora(models: Models) -> float:
    for model in models.values():
        report = LoRA(rank=4, alpha=8, dropout=0.25, targets=["gate", "up", "down"], blocks="all")
        report.apply(model)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("lora_B"):
                    parameter.fill_(0.01)
    return train(models, tokens(2, 40))


@torch.no_grad()
def state(models: Models) -> float:
    """A prefix, then the rest in one piece and token by token."""
    ids = tokens(2, 24)
    worst = 0.0
    for pieces in ((20, 4), (20, 1, 1, 1, 1)):
        logits = []
        for model in models.values():
            past, outputs = None, []
            for piece in ids.split(pieces, dim=1):
                output = model(piece, state=past, return_state=True)
                past = output.state
                outputs.append(output.logits)
            logits.append(torch.cat(outputs, dim=1))
        worst = max(worst, difference(logits[1], logits[0]))
    assert worst <= 1e-5, f"{worst:.1e}"
    return worst


def decoding(models: Models) -> float:
    """Greedy, prompts of unequal length, and more tokens without more compilations."""
    prompts = [[1, 2, 3, 4, 5], [6, 7, 8], [9, 10, 11, 12]]
    for new in (6, 40):
        before = compilations()
        config = GenerationConfig(max_new_tokens=new, temperature=0)
        eager, compiled = (generate(model, prompts, config, pad_id=0) for model in models.values())
        assert compiled == eager
    assert compilations() == before, f"{compilations() - before} compilations for longer outputs"
    return 0.0


def compilations() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


CASES: dict[str, Callable[[Models], float]] = {
    case.__name__: case
    for case in (lengths, padding, packing, checkpointing, autocast, lora, state, decoding)
}


def main(pattern: str, backend: str, cases: list[str]) -> None:
    torch.set_num_threads(1)
    torch.compiler.set_default_backend(backend)
    cfg = compose(["model=hybrid", f"model.block_pattern={pattern}", *SHAPE, *STATE]).model
    built = build_model(cfg, vocab_size=VOCAB).train()
    for name in cases:
        eager, compiled = copy.deepcopy(built), copy.deepcopy(built)
        compiled.compile_blocks()
        assert list(compiled.state_dict()) == list(eager.state_dict())
        print(name, f"{CASES[name]({'eager': eager, 'compiled': compiled}):.1e}", flush=True)
    assert compilations() > 0


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:] or list(CASES))
