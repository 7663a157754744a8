"""Which layers FlashInfer gets, and what it is told; its module is a stand-in that computes."""

import itertools
from typing import Any

import pytest
import torch

from shared.kernels import fallback
from shared.kernels.gpu.flashinfer_kernels import FlashInferKernels
from shared.kernels.gpu.plain import PlainKernels
from shared.kernels.gpu.plan import plan_of
from shared.kernels.types import AttentionBatch
from tests.unit.kernel_reference import Case, attention, make_case

LENGTHS = [(5, 5), (17, 33), (2, 16), (40, 129)]


class Wrapper:
    """``BatchPrefillWithPagedKVCacheWrapper`` as its documentation tells; keeps its plans."""

    made: list["Wrapper"] = []

    def __init__(self, workspace: torch.Tensor, layout: str) -> None:
        assert layout == "NHD"
        self.workspace = workspace
        self.plans: list[dict[str, Any]] = []
        self.made.append(self)

    def plan(self, *arguments: Any, **options: Any) -> None:
        names = (
            *("qo_indptr", "indptr", "indices", "last", "heads", "kv_heads"),
            *("head_dim", "page_size"),
        )
        self.plans.append({**dict(zip(names, arguments, strict=True)), **options})

    def run(self, q: torch.Tensor, pools: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        told = self.plans[-1]
        assert told["causal"] and told["disable_split_kv"]
        assert q.is_contiguous() and q.dtype == told["q_data_type"] == told["kv_data_type"]
        assert (told["heads"], told["head_dim"]) == tuple(q.shape[1:])
        assert (told["page_size"], told["kv_heads"]) == tuple(pools[0].shape[1:3])
        begins = told["indptr"].tolist()
        tables = [told["indices"][a:b] for a, b in itertools.pairwise(begins)]
        context = [
            (len(table) - 1) * told["page_size"] + last
            for table, last in zip(tables, told["last"].tolist(), strict=True)
        ]
        batch = AttentionBatch(
            torch.nn.utils.rnn.pad_sequence(tables, batch_first=True),
            told["qo_indptr"],
            torch.tensor(context).int(),
        )
        scaling, softcap = told["sm_scale"], told["logits_soft_cap"] or 0.0
        return fallback.paged_attention(q, pools, batch, scaling, 0, softcap, None)


class Module:
    BatchPrefillWithPagedKVCacheWrapper = Wrapper


class Counting(PlainKernels):
    def __init__(self) -> None:
        self.calls = 0

    def paged_attention(self, *arguments: Any, **options: Any) -> torch.Tensor:
        self.calls += 1
        return super().paged_attention(*arguments, **options)


@pytest.fixture(autouse=True)
def small_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shared.kernels.gpu.flashinfer_kernels._WORKSPACE", 16)
    Wrapper.made.clear()


def case_of(lengths: list[tuple[int, int]], **change: Any) -> Case:
    shape: dict[str, Any] = {
        **{"heads": 4, "kv_heads": 2, "dims": (64, 64), "block_size": 16},
        **{"pool_dtype": torch.bfloat16, **change},
    }
    case = make_case(1, lengths, **shape)
    return Case(case.q.to(case.k_pool.dtype), case.k_pool, case.v_pool, case.batch)


def run(kernels: FlashInferKernels, case: Case, plan: Any = None, **options: Any) -> torch.Tensor:
    plan = plan or plan_of(case.batch, case.k_pool.shape[0], case.k_pool.shape[1])
    pools = (case.k_pool, case.v_pool)
    defaults = {"window": None, "softcap": None, "sinks": None}
    return kernels.paged_attention(case.q, pools, plan, scaling=0.125, **{**defaults, **options})


@pytest.mark.parametrize("softcap", [None, 20.0])
def test_prompts_are_computed_from_pages_in_its_form(softcap: float | None) -> None:
    """A page list that begins one late, or a last page taken for full, reads other tokens."""
    own = Counting()
    case = case_of(LENGTHS)
    found = run(FlashInferKernels(Module(), own, torch.device("cpu")), case, softcap=softcap)
    assert own.calls == 0
    assert (found.float() - attention(case, 0.125, softcap=softcap)).abs().max() < 3e-2


def test_a_step_is_planned_once_per_kind_of_layer() -> None:
    """Planning costs more than a layer; a plan kept for the next step would attend to its past."""
    kernels = FlashInferKernels(Module(), Counting(), torch.device("cpu"))
    case = case_of(LENGTHS)
    for _ in range(2):
        plan = plan_of(case.batch, case.k_pool.shape[0], 16)
        for softcap in (None, 20.0, None):
            run(kernels, case, plan, softcap=softcap)
    assert [len(wrapper.plans) for wrapper in Wrapper.made] == [2, 2]
    assert Wrapper.made[0].workspace is Wrapper.made[1].workspace


@pytest.mark.parametrize(
    ("lengths", "change", "options"),
    [
        ([(1, 40), (5, 5)], {}, {}),
        (LENGTHS, {}, {"window": 7}),
        (LENGTHS, {}, {"sinks": torch.ones(4)}),
        (LENGTHS, {"dims": (64, 40)}, {}),
        (LENGTHS, {"dims": (80, 80)}, {}),
        (LENGTHS, {"pool_dtype": torch.float32}, {}),
    ],
    ids=["decodes", "window", "sinks", "k-v-dims", "odd-dims", "fp32"],
)
def test_what_it_does_not_do_stays_with_our_kernels(
    lengths: list[tuple[int, int]], change: dict[str, Any], options: dict[str, Any]
) -> None:
    """Sinks silently left out, or a window read below its edge, give plausible text."""
    own = Counting()
    kernels = FlashInferKernels(Module(), own, torch.device("cpu"))
    case = case_of(lengths, **change)
    found = run(kernels, case, **options)
    assert own.calls == 1
    assert not Wrapper.made
    assert (found.float() - attention(case, 0.125, **options)).abs().max() < 3e-2
