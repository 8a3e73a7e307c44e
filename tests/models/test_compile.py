"""``torch.compile`` gives the same numbers. Compiling takes minutes, hence ``slow``."""

from __future__ import annotations

import copy
import shutil

import pytest
import torch

from refragkit import build_model, compose
from refragkit.errors import ConfigError
from refragkit.generation.engine import GenerationConfig, generate

SHAPE = ["model.d_model=32", "model.n_heads=2", "model.n_kv_heads=1", "model.head_dim=16", "model.d_ff=48"]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("pattern", ["T", "M", "R"])
def test_compiled_blocks_give_the_same_numbers(pattern: str) -> None:
    cfg = compose(
        ["model=hybrid", f"model.block_pattern={pattern * 2}", "model.wkv_head_dim=16", *SHAPE]
    ).model
    eager = build_model(cfg, vocab_size=64)
    compiled = copy.deepcopy(eager)
    compiled.compile_blocks()
    assert list(compiled.state_dict()) == list(eager.state_dict())
    for tokens in (40, 71):
        ids = torch.randint(0, 64, (2, tokens), generator=torch.Generator().manual_seed(tokens))
        mask = torch.ones(2, tokens)
        mask[1, tokens - 9 :] = 0
        for model in (eager, compiled):
            model.zero_grad()
            logits = model(ids, attention_mask=mask).logits
            torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:]).backward()
        for (name, a), (_, b) in zip(eager.named_parameters(), compiled.named_parameters(), strict=True):
            if a.grad is not None:
                torch.testing.assert_close(b.grad, a.grad, rtol=1e-3, atol=1e-5, msg=name)
    prompts = [[1, 2, 3, 4, 5], [6, 7, 8]]
    config = GenerationConfig(max_new_tokens=6)
    assert generate(compiled, prompts, config, pad_id=0) == generate(eager, prompts, config, pad_id=0)


def test_without_a_compiler_the_setting_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import cpp_builder
    from torch._inductor.exc import InvalidCxxCompiler

    def none() -> str:
        raise InvalidCxxCompiler

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", none)
    cfg = compose(["model=hybrid", "model.block_pattern=T", *SHAPE]).model
    with pytest.raises(ConfigError, match=r"hardware\.compile=true needs a C\+\+ compiler"):
        build_model(cfg, vocab_size=64).compile_blocks()
