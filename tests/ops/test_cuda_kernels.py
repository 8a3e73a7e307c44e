"""flash-linear-attention's kernels behind the ops: what we pass, what we do with what comes back, and when.

Without a GPU the kernels are played by the recurrences that fla documents, which are compared with its own naive
forms and its signatures where the package is installed. ``interpreted_kernels.py`` runs the kernels themselves.
"""

from __future__ import annotations

import ast
import importlib.util
import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from refragkit.ops import cuda_kernels
from refragkit.ops.ssd import ssd, ssd_reference
from refragkit.ops.wkv7 import wkv7, wkv7_reference

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

LEAST_LOG_DECAY = -0.6065306597126334
SEGMENTS = [[1] * 3 + [2] * 1 + [3] * 8 + [0] * 1, [5] * 13, [1] * 12 + [2] * 1]


def simple_gla(q, k, v, g, *, scale, initial_state, output_final_state, state_v_first, cu_seqlens):
    """``h_t = exp(g_t) h_{t-1} + k_t v_t^T``, ``o_t = scale q_t h_t``, with ``h`` of ``[K, V]``."""
    assert output_final_state and {q.dtype, k.dtype} == {v.dtype}  # what the Triton kernel needs
    precise = torch.promote_types(v.dtype, torch.float32)

    def run(tokens: list[Tensor], h: Tensor | None) -> tuple[Tensor, Tensor]:
        q, k, v, g = (t.to(precise) for t in tokens)
        h = q.new_zeros(*q.shape[::2], q.shape[3], v.shape[3]) if h is None else h.mT if state_v_first else h
        outputs = []
        for t in range(q.shape[1]):
            h = g[:, t, :, None, None].exp() * h + k[:, t, :, :, None] * v[:, t, :, None, :]
            outputs.append(scale * torch.einsum("bhk,bhkv->bhv", q[:, t], h))
        return torch.stack(outputs, 1).to(tokens[2].dtype), h.mT if state_v_first else h

    return over_sequences(run, [q, k, v, g], initial_state, cu_seqlens)


def rwkv7(r, w, k, v, a, b, *, scale, initial_state, output_final_state, cu_seqlens):
    """``h_t = diag(exp w_t) h_{t-1} + b_t (a_t^T h_{t-1}) + k_t v_t^T``, ``o_t = scale r_t h_t``."""
    assert output_final_state
    precise = torch.promote_types(v.dtype, torch.float32)

    def run(tokens: list[Tensor], h: Tensor | None) -> tuple[Tensor, Tensor]:
        r, w, k, v, a, b = (t.to(precise) for t in tokens)
        h = r.new_zeros(*r.shape[::2], r.shape[3], v.shape[3]) if h is None else h
        outputs = []
        for t in range(r.shape[1]):
            removed = torch.einsum("bhk,bhkv->bhv", a[:, t], h)
            h = w[:, t, :, :, None].exp() * h + b[:, t, :, :, None] * removed[:, :, None]
            h = h + k[:, t, :, :, None] * v[:, t, :, None, :]
            outputs.append(scale * torch.einsum("bhk,bhkv->bhv", r[:, t], h))
        return torch.stack(outputs, 1).to(tokens[3].dtype), h

    return over_sequences(run, [r, w, k, v, a, b], initial_state, cu_seqlens)


def chunk_rwkv7(r, w, k, v, a, b, *, lower_bound, **options):
    assert {r.dtype, k.dtype, a.dtype, b.dtype} == {v.dtype}
    assert lower_bound is None or (lower_bound < 0 and w.min() >= lower_bound)
    return rwkv7(r, w, k, v, a, b, **options)


def over_sequences(
    run: Callable, tokens: list[Tensor], initial_state: Tensor | None, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor]:
    if cu_seqlens is None:
        return run(tokens, initial_state)
    assert tokens[0].shape[0] == 1 and cu_seqlens.dtype == torch.int64
    assert initial_state is None or len(initial_state) == len(cu_seqlens) - 1
    cuts = cu_seqlens.tolist()
    results = []
    for i, (start, end) in enumerate(pairwise(cuts)):
        state = None if initial_state is None else initial_state[i : i + 1]
        results.append(run([t[:, start:end] for t in tokens], state))
    return torch.cat([out for out, _ in results], 1), torch.cat([state for _, state in results])


def refuse(*_args, **_options):
    raise AssertionError("not this kernel")


KERNELS = cuda_kernels.Kernels(chunk_rwkv7, refuse, simple_gla, ssd_trains=True)


def ssd_inputs(
    T: int, *, with_state: bool, batch: int = 3, H: int = 4, P: int = 5, G: int = 2, N: int = 6
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(T)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    dt = functional.softplus(normal(batch, T, H))
    dt[0, -1] = 0  # padding
    tensors = [normal(batch, T, H, P), dt, -normal(H).exp(), normal(batch, T, G, N), normal(batch, T, G, N)]
    tensors += [normal(H)] + ([normal(batch, H, P, N)] if with_state else [])
    return [tensor.requires_grad_() for tensor in tensors]


def wkv7_inputs(T: int, *, with_state: bool, batch: int = 3, H: int = 2, N: int = 6) -> list[Tensor]:
    generator = torch.Generator().manual_seed(T)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    r, k, v = (normal(batch, T, H, N) for _ in range(3))
    log_decay = LEAST_LOG_DECAY * torch.sigmoid(3 * normal(batch, T, H, N))
    kk = functional.normalize(normal(batch, T, H, N), dim=-1)
    removal = -kk
    for padded in (log_decay, k, removal):
        padded[0, -1] = 0
    tensors = [r, log_decay, k, v, removal, kk * torch.sigmoid(normal(batch, T, H, N))]
    tensors += [normal(batch, H, N, N)] if with_state else []
    return [tensor.requires_grad_() for tensor in tensors]


def values_and_gradients(function: Callable, tensors: list[Tensor]) -> list[Tensor]:
    out, state = function(*tensors)
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype, device=out.device).view_as(out)
    loss = (out * weights).sum() + (state * state.detach().cos()).sum()
    return [
        out,
        state,
        *torch.autograd.grad(loss, tensors, allow_unused=True, materialize_grads=True),
    ]


def assert_all_close(got: list[Tensor], wanted: list[Tensor]) -> None:
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("with_state", [False, True])
def test_ssd_equals_the_recurrence_in_value_and_gradient(with_state: bool, packed: bool) -> None:
    ids = torch.tensor(SEGMENTS) if packed else None

    def fast(x, dt, A, B, C, D, state=None):
        return cuda_kernels.ssd(KERNELS, x, dt, A, B, C, state, D, ids)

    def slow(x, dt, A, B, C, D, state=None):
        return ssd_reference(x, dt, A, B, C, state, D=D, segment_ids=ids)

    tensors = ssd_inputs(13, with_state=with_state)
    assert_all_close(values_and_gradients(fast, tensors), values_and_gradients(slow, tensors))


@pytest.mark.parametrize("bound", [None, LEAST_LOG_DECAY, 0.0])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("with_state", [False, True])
def test_wkv7_equals_the_recurrence_in_value_and_gradient(
    with_state: bool, packed: bool, bound: float | None
) -> None:
    ids = torch.tensor(SEGMENTS) if packed else None

    def fast(r, w, k, v, a, b, state=None):
        return cuda_kernels.wkv7(KERNELS, r, w, k, v, a, b, state, ids, bound)

    def slow(r, w, k, v, a, b, state=None):
        return wkv7_reference(r, w, k, v, a, b, state, segment_ids=ids)

    tensors = wkv7_inputs(13, with_state=with_state)
    assert_all_close(values_and_gradients(fast, tensors), values_and_gradients(slow, tensors))


@pytest.mark.parametrize("T", [1, 13])
def test_few_tokens_without_gradients_take_the_recurrent_kernel(T: int) -> None:
    kernels = cuda_kernels.Kernels(refuse, rwkv7, refuse, ssd_trains=True)
    tensors = [tensor.detach() for tensor in wkv7_inputs(T, with_state=True)]
    *tokens, state = tensors
    assert_all_close(
        list(cuda_kernels.wkv7(kernels, *tokens, state, None, LEAST_LOG_DECAY)),
        list(wkv7_reference(*tensors)),
    )


def test_a_state_that_came_from_the_kernel_goes_back_without_a_copy() -> None:
    given: list[Tensor] = []

    def kernel(r, w, k, v, a, b, **options):
        given.append(options["initial_state"])
        return rwkv7(r, w, k, v, a, b, **options)

    kernels = cuda_kernels.Kernels(refuse, kernel, refuse, ssd_trains=True)
    tokens = [tensor.detach() for tensor in wkv7_inputs(2, with_state=False)]
    _, state = cuda_kernels.wkv7(kernels, *tokens, None, None, LEAST_LOG_DECAY)
    cuda_kernels.wkv7(kernels, *tokens, state, None, LEAST_LOG_DECAY)
    assert given[1].is_contiguous() and given[1].data_ptr() == state.data_ptr()


def test_half_precision_inputs_and_float32_states() -> None:
    *tokens, D, state = (t.detach().float() for t in ssd_inputs(13, with_state=True))
    x, dt, A, B, C = tokens
    low = x.bfloat16(), dt, A, B.bfloat16(), C.bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, after = cuda_kernels.ssd(KERNELS, *low, state, D, None)
    wanted, wanted_after = ssd_reference(*tokens, state, D=D)
    assert (y.dtype, after.dtype) == (torch.bfloat16, torch.float32)
    assert float((y - wanted).norm() / wanted.norm()) < 2e-2
    assert float((after - wanted_after).norm() / wanted_after.norm()) < 2e-2

    r, w, k, v, a, b, state = (t.detach() for t in wkv7_inputs(13, with_state=True))
    r.requires_grad_()  # for the chunk kernel
    with torch.autocast("cpu", dtype=torch.bfloat16):  # as a layer gives them: some in float32
        out, after = cuda_kernels.wkv7(
            KERNELS,
            r.bfloat16(),
            w.float(),
            k.float(),
            v.bfloat16(),
            a.float(),
            b.float(),
            state.float(),
            None,
            None,
        )
    out, after = out.detach(), after.detach()
    wanted, wanted_after = wkv7_reference(r.detach(), w, k, v, a, b, state)
    assert (out.dtype, after.dtype) == (torch.bfloat16, torch.float32)
    assert float((out - wanted).norm() / wanted.norm()) < 2e-2
    assert float((after - wanted_after).norm() / wanted_after.norm()) < 2e-2


# Which arguments go to the kernels


class OnGpu(torch.Tensor):
    """Claims to be on a GPU; a real one is not needed to choose."""

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True


def chosen_for_ssd(dtype: torch.dtype = torch.bfloat16, *, T: int = 9, P: int = 16, gradients: bool = False):
    x, dt, A, B, C, _, state = (t.detach() for t in ssd_inputs(T, with_state=True, P=P, N=16))
    x = x.to(dtype).as_subclass(OnGpu)
    return cuda_kernels.for_ssd(x, dt.requires_grad_(gradients), A, B, C, state)


def chosen_for_wkv7(dtype: torch.dtype = torch.bfloat16, *, T: int = 9, N: int = 16, gradients: bool = False):
    r, w, k, v, a, b, state = (t.detach() for t in wkv7_inputs(T, with_state=True, N=N))
    return cuda_kernels.for_wkv7(
        r, w, k, v.to(dtype).as_subclass(OnGpu), a, b, state.requires_grad_(gradients)
    )


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_kernels, "available", lambda: KERNELS)


@pytest.mark.usefixtures("installed")
def test_the_arguments_that_the_chunk_kernels_take() -> None:
    assert chosen_for_ssd() is chosen_for_ssd(gradients=True) is KERNELS
    assert chosen_for_ssd(T=1) is chosen_for_ssd(P=24) is None
    assert chosen_for_wkv7(gradients=True) is chosen_for_wkv7(T=64) is KERNELS
    assert chosen_for_wkv7(N=24) is chosen_for_wkv7(T=1, gradients=True) is None
    with torch.no_grad():
        assert chosen_for_wkv7(T=1, gradients=True) is KERNELS
    for dtype in (torch.float16, torch.float32, torch.float64):
        assert chosen_for_ssd(dtype) is None
        assert chosen_for_wkv7(dtype, gradients=True) is chosen_for_wkv7(dtype, T=64) is None


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_recurrent_kernel_takes_every_type_but_float64(dtype: torch.dtype) -> None:
    assert chosen_for_wkv7(dtype) is chosen_for_wkv7(dtype, T=1) is KERNELS
    assert chosen_for_wkv7(torch.float64) is None


def test_a_miscompiled_backward_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = KERNELS._replace(ssd_trains=False)
    monkeypatch.setattr(cuda_kernels, "available", lambda: broken)
    assert chosen_for_ssd(gradients=True) is None
    assert chosen_for_ssd() is broken
    with torch.no_grad():
        assert chosen_for_ssd(gradients=True) is broken


@pytest.mark.usefixtures("installed")
def test_the_ops_call_what_was_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_kernels, "for_ssd", lambda *_: KERNELS)
    monkeypatch.setattr(cuda_kernels, "for_wkv7", lambda *_: KERNELS)
    ids = torch.tensor(SEGMENTS)

    def with_skip(function):
        return lambda *t: function(*t[:5], t[6], D=t[5], segment_ids=ids)

    def packed(function):
        return lambda *t: function(*t, segment_ids=ids)

    tensors = ssd_inputs(13, with_state=True)
    monkeypatch.setattr("refragkit.ops.ssd._ChunkedSSD.apply", refuse)
    assert_all_close(
        values_and_gradients(with_skip(ssd), tensors), values_and_gradients(with_skip(ssd_reference), tensors)
    )
    tensors = wkv7_inputs(13, with_state=True)
    monkeypatch.setattr("refragkit.ops.wkv7._chunked", refuse)
    assert_all_close(
        values_and_gradients(packed(wkv7), tensors), values_and_gradients(packed(wkv7_reference), tensors)
    )


def test_on_a_cpu_nothing_is_even_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_kernels, "available", refuse)
    tensors = [t.detach().bfloat16() for t in ssd_inputs(13, with_state=False, P=16, N=16)]
    ssd(*tensors[:5])
    wkv7(*(t.detach().bfloat16() for t in wkv7_inputs(13, with_state=True, N=16)))


# The package


@pytest.fixture
def fresh() -> Iterator[None]:
    """A search for the package as in a new process."""
    kept = {name: module for name, module in sys.modules.items() if name.split(".")[0] in {"fla", "triton"}}
    for name in kept:
        del sys.modules[name]
    cuda_kernels.available.cache_clear()
    yield
    cuda_kernels.available.cache_clear()
    for name in [name for name in sys.modules if name.split(".")[0] in {"fla", "triton"}]:
        del sys.modules[name]
    sys.modules.update(kept)


def write_package(
    folder: Path, simple_gla: str = "q, k, v, g, state_v_first, **kwargs", triton: str = "3.7.1"
):
    shared = "scale, initial_state, output_final_state, cu_seqlens"
    files = {
        "triton/__init__.py": f"__version__ = {triton!r}",
        "fla/__init__.py": "__version__ = '0.6.0'",
        "fla/ops/__init__.py": "",
        "fla/ops/rwkv7.py": f"def chunk_rwkv7(r, w, k, v, a, b, {shared}, lower_bound): ...\n"
        f"def fused_recurrent_rwkv7(r, w, k, v, a, b, {shared}): ...\n",
        "fla/ops/simple_gla.py": f"def chunk_simple_gla({shared}, {simple_gla}): ...\n",
    }
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


@pytest.mark.usefixtures("fresh")
def test_without_the_package_one_line_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with caplog.at_level(logging.INFO, "refragkit"):
        assert cuda_kernels.available() is cuda_kernels.available() is None
    (message,) = caplog.messages
    assert "PyTorch's own" in message and "pip install refragkit[cuda]" in message


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize(
    ("capability", "triton", "trains"),
    [
        ((8, 0), "3.6.0", True),
        ((9, 0), "3.6.0", False),
        ((9, 0), "3.7.1", True),
        ((9, 0), "3.3.1+cu12", True),
    ],
)
def test_the_package_is_named_in_the_log(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capability: tuple[int, int],
    triton: str,
    trains: bool,
) -> None:
    write_package(tmp_path, triton=triton)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    with caplog.at_level(logging.INFO, "refragkit"):
        kernels = cuda_kernels.available()
        assert cuda_kernels.available() is kernels
    assert kernels is not None and kernels.ssd_trains is trains
    (message,) = caplog.messages
    assert "flash-linear-attention 0.6.0" in message and ("3.7.1" in message) is not trains


@pytest.mark.usefixtures("fresh")
def test_a_version_that_would_ignore_an_argument_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write_package(tmp_path, simple_gla="q, k, v, g, transpose_state_layout, **kwargs")
    monkeypatch.syspath_prepend(tmp_path)
    assert cuda_kernels.available() is None
    (message,) = caplog.messages
    assert "chunk_simple_gla without state_v_first" in message


@pytest.mark.usefixtures("fresh")
def test_a_package_that_does_not_import_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_package(tmp_path)
    (tmp_path / "fla/ops/rwkv7.py").write_text("import a_missing_compiler", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="a_missing_compiler"):
        cuda_kernels.available()


def source(path: str) -> Path:
    """A file of the installed package, which is not imported: that takes Triton."""
    spec = importlib.util.find_spec("fla")
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        if (Path(folder) / path).is_file():
            return Path(folder) / path
    pytest.skip("flash-linear-attention is not installed")


@pytest.mark.parametrize(
    ("path", "function"),
    [
        ("ops/rwkv7/chunk.py", "chunk_rwkv7"),
        ("ops/rwkv7/fused_recurrent.py", "fused_recurrent_rwkv7"),
        ("ops/simple_gla/chunk.py", "chunk_simple_gla"),
    ],
)
def test_the_installed_package_knows_every_argument(path: str, function: str) -> None:
    tree = ast.parse(source(path).read_text(encoding="utf-8"))
    (definition,) = (
        node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == function
    )
    names = {argument.arg for argument in [*definition.args.args, *definition.args.kwonlyargs]}
    assert names >= cuda_kernels.ARGUMENTS[function]


def naive(path: str):
    file = source(path)
    pytest.importorskip("einops")
    spec = importlib.util.spec_from_file_location("fla_naive", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_packages_naive_simple_gla_is_the_one_of_these_tests() -> None:
    forms = naive("ops/simple_gla/naive.py")
    x, dt, A, B, C, _, state = (t.detach().float() for t in ssd_inputs(13, with_state=True, G=4))
    q, k, v, g = C, B, x * dt[..., None], dt * A
    options = {"scale": 1.0, "initial_state": state.mT, "output_final_state": True}
    wanted = simple_gla(q, k, v, g, state_v_first=False, cu_seqlens=None, **options)
    for form in (forms.naive_recurrent_simple_gla, forms.naive_chunk_simple_gla):
        for got, other in zip(form(q, k, v, g, **options), wanted, strict=True):
            torch.testing.assert_close(got, other, rtol=1e-4, atol=1e-4)


def test_the_packages_naive_rwkv7_is_the_one_of_these_tests() -> None:
    forms = naive("ops/generalized_delta_rule/dplr/naive.py")
    r, w, k, v, a, b, state = (t.detach().float() for t in wkv7_inputs(13, with_state=True))
    scale = r.shape[3] ** -0.5  # built in there
    out, after = rwkv7(
        r, w, k, v, a, b, scale=scale, initial_state=state, output_final_state=True, cu_seqlens=None
    )
    got, got_after = forms.dplr_recurrence(*(t.transpose(1, 2) for t in (r, k, v, a, b, w)), state)
    torch.testing.assert_close(got.transpose(1, 2), out, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(got_after, after, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_the_kernels_themselves_in_tritons_interpreter() -> None:
    for package in ("fla", "triton", "einops"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    if torch.cuda.is_available():
        pytest.skip("the tests on the GPU say more")
    script = Path(__file__).with_name("interpreted_kernels.py")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


# On a GPU: the kernels against our own forms


def largest_error(got: list[Tensor], wanted: list[Tensor]) -> float:
    return max(
        float((one.double() - other.double()).norm() / other.double().norm().clamp(min=1e-6))
        for one, other in zip(got, wanted, strict=True)
    )


@pytest.fixture
def kernels() -> cuda_kernels.Kernels:
    found = cuda_kernels.available()
    if found is None:
        pytest.skip("flash-linear-attention is not installed: pip install refragkit[cuda]")
    return found


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("T", [2, 63, 200])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("with_state", [False, True])
def test_ssd_on_a_gpu(kernels: cuda_kernels.Kernels, with_state: bool, packed: bool, T: int) -> None:
    if not kernels.ssd_trains:
        pytest.skip("its backward is not used with this Triton")
    inputs = ssd_inputs(T, with_state=with_state, H=4, P=64, G=1, N=128)
    halves = [t.detach().to("cuda", torch.bfloat16).float().requires_grad_() for t in inputs]
    ids = (torch.arange(T, device="cuda") // 50).expand(3, T).contiguous() if packed else None

    def cast(x, dt, A, B, C, D, state=None):
        low = x.bfloat16(), dt, A, B.bfloat16(), C.bfloat16()
        assert cuda_kernels.for_ssd(*low, state) is kernels
        return ssd(*low, state, D=D, segment_ids=ids)

    def slow(x, dt, A, B, C, D, state=None):
        return ssd_reference(x, dt, A, B, C, state, D=D, segment_ids=ids)

    wide = [t.detach().double().requires_grad_() for t in halves]
    assert largest_error(values_and_gradients(cast, halves), values_and_gradients(slow, wide)) < 5e-2


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("bound", [None, LEAST_LOG_DECAY])
@pytest.mark.parametrize("T", [2, 63, 200])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("with_state", [False, True])
def test_wkv7_on_a_gpu(
    kernels: cuda_kernels.Kernels, with_state: bool, packed: bool, T: int, bound: float | None
) -> None:
    inputs = wkv7_inputs(T, with_state=with_state, N=64)
    halves = [t.detach().to("cuda", torch.bfloat16).float() for t in inputs]
    halves[1].clamp_(min=LEAST_LOG_DECAY)
    halves = [t.requires_grad_() for t in halves]
    ids = (torch.arange(T, device="cuda") // 50).expand(3, T).contiguous() if packed else None

    def cast(r, w, k, v, a, b, state=None):
        low = r.bfloat16(), w, k.bfloat16(), v.bfloat16(), a.bfloat16(), b.bfloat16()
        assert cuda_kernels.for_wkv7(*low, state) is kernels
        return wkv7(*low, state, segment_ids=ids, least_log_decay=bound)

    def slow(r, w, k, v, a, b, state=None):
        return wkv7_reference(r, w, k, v, a, b, state, segment_ids=ids)

    wide = [t.detach().double().requires_grad_() for t in halves]
    assert largest_error(values_and_gradients(cast, halves), values_and_gradients(slow, wide)) < 5e-2


@pytest.mark.gpu
@on_gpu
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("T", [1, 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decoding_on_a_gpu(dtype: torch.dtype, T: int) -> None:
    inputs = [t.detach().to("cuda", torch.float32) for t in wkv7_inputs(T, with_state=True, N=64)]
    *tokens, state = inputs
    halves = [t.to(dtype) for t in tokens]
    halves[1] = tokens[1]
    assert cuda_kernels.for_wkv7(*halves, state) is not None
    out, after = wkv7(*halves, state)
    wanted = wkv7_reference(*(t.double() for t in halves), state.double())
    assert largest_error([out, after], list(wanted)) < (1e-5 if dtype == torch.float32 else 5e-3)
