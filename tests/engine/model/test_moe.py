"""Experts: which are chosen and with what share, and that each token is computed by its own experts however tokens are grouped."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from baton.engine.choice import choose_ops
from baton.engine.cpu.kernel import ArgumentError
from baton.engine.model.checkpoint import ExpertConfig
from baton.engine.model.moe import GroupedExperts, Mlp, SeparateExperts
from baton.engine.model.ops import Ops
from baton.engine.model.weights import Weights

HIDDEN, INNER, COUNT = 16, 24, 6
LAYERS = frozenset({0})


def tensors() -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(5)
    shapes = {"gate_proj": (INNER, HIDDEN), "up_proj": (INNER, HIDDEN), "down_proj": (HIDDEN, INNER)}
    return {f"{i}.{name}.weight": torch.randn(shape, generator=random) for i in range(COUNT) for name, shape in shapes.items()}


CPU = torch.device("cpu")


@pytest.fixture(params=["plain", "compiled"])
def ops(request: pytest.FixtureRequest) -> Ops:
    return choose_ops(CPU, torch.float32, compiled=request.param == "compiled", products="baton")


@pytest.fixture(params=[SeparateExperts, GroupedExperts])
def experts(request: pytest.FixtureRequest, ops: Ops) -> SeparateExperts | GroupedExperts:
    weights = Weights(tensors().__getitem__, torch.float32, CPU, "auto", ops=ops)
    made: SeparateExperts | GroupedExperts = request.param(COUNT, weights, ops.silu_mul, ops)
    return made


def by_token(x: Tensor, shares: Tensor, chosen: Tensor) -> Tensor:
    """The definition, one token and one expert at a time."""
    w, y = tensors(), torch.zeros_like(x)
    for token in range(len(x)):
        for share, expert in zip(shares[token], chosen[token].tolist(), strict=True):
            gate, up, down = (w[f"{expert}.{name}_proj.weight"] for name in ("gate", "up", "down"))
            y[token] += share * (down @ (F.silu(gate @ x[token]) * (up @ x[token])))
    return y


@pytest.mark.parametrize("tokens", [0, 1, 2, 37])
@pytest.mark.parametrize("k", [1, 3, COUNT])
def test_each_token_is_the_sum_of_its_experts(experts: SeparateExperts | GroupedExperts, tokens: int, k: int) -> None:
    torch.manual_seed(tokens)
    x, shares = torch.randn(tokens, HIDDEN), torch.rand(tokens, k)
    chosen = torch.rand(tokens, COUNT).argsort(dim=-1)[:, :k]
    torch.testing.assert_close(experts(x, shares, chosen), by_token(x, shares, chosen), atol=2e-4, rtol=0)


@pytest.mark.parametrize("tokens", [1, 3, 37, 300])
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "int8", "int4"])
def test_experts_at_once_compute_what_each_computes_alone(precision: str, tokens: int) -> None:
    """Bit for bit, so that a token's experts do not depend on the batch. 300 tokens are more than an expert takes at a time."""
    dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
    ops = choose_ops(CPU, dtype, compiled=True, products="baton")
    weights = Weights(tensors().__getitem__, dtype, CPU, precision if precision.startswith("int") else "auto", ops=ops)
    experts = SeparateExperts(COUNT, weights, ops.silu_mul, ops)
    assert experts.gate_up is not None and experts.down is not None
    random = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, HIDDEN, generator=random).to(dtype)
    chosen = torch.rand(tokens, COUNT, generator=random).argsort(dim=-1)[:, :3]
    found = experts.each(x, chosen).view(tokens, 3, HIDDEN)
    for token in range(tokens):
        for k in range(3):
            assert torch.equal(found[token, k], experts.networks[int(chosen[token, k])](x[token : token + 1])[0])


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "int8", "int4"])
def test_many_tokens_pass_a_network_in_parts_with_the_same_bits(precision: str) -> None:
    dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
    ops, passed = choose_ops(CPU, dtype, compiled=True, products="baton"), list[int]()

    def activate(gate_up: Tensor) -> Tensor:
        passed.append(len(gate_up))
        return ops.silu_mul(gate_up)

    weights = Weights(tensors().__getitem__, dtype, CPU, precision if precision.startswith("int") else "auto", ops=ops)
    network, most = Mlp(weights.under("0"), activate), ops.at_once
    assert most is not None
    x = torch.randn(2 * most + 7, HIDDEN, generator=torch.Generator().manual_seed(1)).to(dtype)
    found, at_most = network(x), network(x[:most])
    assert passed == [most, most, 7, most]
    network.at_once = None
    assert torch.equal(found, network(x)) and torch.equal(at_most, found[:most]) and passed[-1] == len(x)


@pytest.mark.parametrize("used", [[0], [COUNT - 1], [1, 4]])
def test_results_are_right_when_some_experts_go_unused(experts: SeparateExperts | GroupedExperts, used: list[int]) -> None:
    torch.manual_seed(3)
    x, shares = torch.randn(9, HIDDEN), torch.rand(9, 1)
    chosen = torch.tensor(used)[torch.randint(len(used), (9, 1))]
    torch.testing.assert_close(experts(x, shares, chosen), by_token(x, shares, chosen), atol=2e-4, rtol=0)


def test_each_chosen_expert_computes_all_its_tokens_in_one_call() -> None:
    experts = SeparateExperts(COUNT, Weights(tensors().__getitem__, torch.float32, CPU, "auto"), Ops().silu_mul, Ops())
    calls: list[tuple[int, int]] = []

    def counted(expert: int, network: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        def call(rows: Tensor) -> Tensor:
            calls.append((expert, len(rows)))
            return network(rows)

        return call

    experts.networks = [counted(i, network) for i, network in enumerate(experts.networks)]  # type: ignore[misc]
    chosen = torch.tensor([[4, 1]] * 30 + [[1, 3]] * 10)
    experts(torch.randn(40, HIDDEN), torch.rand(40, 2), chosen)
    assert calls == [(1, 40), (3, 10), (4, 30)]


# --- routing ------------------------------------------------------------------------------------------------------------------------


def logits(*probabilities: float) -> Tensor:
    """[1, E], whose softmax is `probabilities`."""
    return torch.tensor([probabilities]).log()


def sigmoid_logits(*scores: float) -> Tensor:
    """[1, E], whose sigmoids are `scores`."""
    return torch.tensor([scores]).logit()


def chosen_shares(ops: Ops, given: Tensor, config: ExpertConfig, bias: Tensor | None = None) -> dict[int, float]:
    shares, chosen = ops.route(given, bias, config)
    return {expert: round(share, 5) for expert, share in zip(chosen[0].tolist(), shares[0].tolist(), strict=True)}


def test_the_most_probable_experts_are_chosen_with_their_probability_as_share(ops: Ops) -> None:
    config = ExpertConfig(LAYERS, 4, 2, INNER)
    assert chosen_shares(ops, logits(0.1, 0.4, 0.2, 0.3), config) == {1: 0.4, 3: 0.3}


def test_normalised_shares_sum_to_the_scale(ops: Ops) -> None:
    config = ExpertConfig(LAYERS, 4, 2, INNER, normalised=True, scale=2.0)
    assert chosen_shares(ops, logits(0.1, 0.5, 0.1, 0.3), config) == {1: 1.25, 3: 0.75}


def test_a_group_is_ranked_by_its_best_expert(ops: Ops) -> None:
    config = ExpertConfig(LAYERS, 6, 2, INNER, groups=3, open_groups=1)
    assert chosen_shares(ops, logits(0.2, 0.22, 0.25, 0.05, 0.21, 0.07), config) == {2: 0.25, 3: 0.05}


def test_with_sigmoids_a_group_is_ranked_by_its_two_best_experts(ops: Ops) -> None:
    config = ExpertConfig(LAYERS, 6, 2, INNER, sigmoid=True, groups=3, open_groups=1)
    assert chosen_shares(ops, sigmoid_logits(0.6, 0.5, 0.9, 0.1, 0.2, 0.2), config) == {0: 0.6, 1: 0.5}


def test_a_bias_affects_the_choice_but_not_the_shares(ops: Ops) -> None:
    config = ExpertConfig(LAYERS, 4, 2, INNER, sigmoid=True, biased=True)
    given = sigmoid_logits(0.9, 0.5, 0.4, 0.3)
    assert chosen_shares(ops, given, config, torch.zeros(4)) == {0: 0.9, 1: 0.5}
    assert chosen_shares(ops, given, config, torch.tensor([0.0, 0.0, 0.0, 1.0])) == {3: 0.3, 0: 0.9}


def test_a_negative_bias_does_not_close_an_open_group(ops: Ops) -> None:
    """A closed group must lose even to an open one whose biased scores are below zero."""
    config = ExpertConfig(LAYERS, 4, 2, INNER, sigmoid=True, biased=True, groups=2, open_groups=1)
    assert chosen_shares(ops, sigmoid_logits(0.5, 0.4, 0.9, 0.8), config, torch.tensor([-1.0, -1.0, -3.0, -3.0])) == {0: 0.5, 1: 0.4}


def test_all_zero_scores_do_not_give_nan(ops: Ops) -> None:
    config = ExpertConfig(LAYERS, 4, 2, INNER, sigmoid=True, normalised=True)
    shares, _ = ops.route(torch.full((1, 4), -1e4), None, config)
    torch.testing.assert_close(shares, torch.zeros(1, 2), atol=1e-18, rtol=0)


@pytest.mark.parametrize("groups", [1, 4])
def test_routing_no_tokens_returns_empty_tensors(ops: Ops, groups: int) -> None:
    shares, chosen = ops.route(torch.empty(0, 8), None, ExpertConfig(LAYERS, 8, 2, INNER, groups=groups, open_groups=1))
    assert shares.shape == chosen.shape == (0, 2)


@pytest.mark.parametrize("sigmoid", [False, True])
def test_each_token_is_routed_independently(ops: Ops, sigmoid: bool) -> None:
    config = ExpertConfig(LAYERS, 8, 3, INNER, sigmoid=sigmoid, groups=4, open_groups=2, normalised=True)
    given = torch.randn(20, 8, generator=torch.Generator().manual_seed(1))
    shares, chosen = ops.route(given, None, config)
    for i in range(20):
        alone = ops.route(given[i : i + 1], None, config)
        assert torch.equal(alone[1][0], chosen[i])
        torch.testing.assert_close(alone[0][0], shares[i])


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("sigmoid", [False, True])
@pytest.mark.parametrize(("count", "groups"), [(1, 1), (7, 1), (60, 1), (64, 8), (256, 8)])
def test_compiled_routing_matches_plain_torch(count: int, groups: int, sigmoid: bool, biased: bool) -> None:
    config = ExpertConfig(LAYERS, count, min(count, 6), INNER, sigmoid, biased, groups, min(groups, 3), normalised=biased, scale=2.5)
    random = torch.Generator().manual_seed(count)
    given = torch.randn(40, count, generator=random) * 3
    bias = torch.randn(count, generator=random) if biased else None
    ours = choose_ops(CPU, torch.float32, compiled=True).route(given, bias, config)
    theirs = Ops().route(given, bias, config)
    assert torch.equal(ours[1], theirs[1])
    torch.testing.assert_close(ours[0], theirs[0], rtol=1e-5, atol=1e-7)


def test_logits_that_are_not_numbers_choose_experts_that_exist() -> None:
    """Their addresses are looked up in a table."""
    ops, config = choose_ops(CPU, torch.float32, compiled=True), ExpertConfig(LAYERS, 8, 3, INNER, groups=4, open_groups=2)
    for number in (torch.nan, -torch.nan, torch.inf, -torch.inf):
        _, chosen = ops.route(torch.full((2, 8), number), None, config)
        assert chosen.min() >= 0 and chosen.max() < 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("more", [False, True])
def test_compiled_sums_match_plain_torch(dtype: torch.dtype, more: bool) -> None:
    y, shares = torch.randn(15, 37).to(dtype), torch.rand(5, 3)
    added = torch.randn(5, 37).to(dtype) if more else None
    precise = (shares[..., None] * y.view(5, 3, 37).float()).sum(dim=1) + (0 if added is None else added.float())
    ours = choose_ops(CPU, dtype, compiled=True).combine(y, shares, added)
    torch.testing.assert_close(ours, precise.to(dtype), rtol=2**-7 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 3, 200])
def test_each_head_is_multiplied_by_its_own_matrix(dtype: torch.dtype, tokens: int) -> None:
    """The heads' rows are parts of longer ones."""
    x, matrices = torch.randn(tokens, 5, 40).to(dtype)[..., :24], torch.randn(5, 37, 24).to(dtype)
    ours, theirs = (choose_ops(CPU, dtype, compiled=compiled).per_head(matrices)(x) for compiled in (True, False))
    torch.testing.assert_close(ours, theirs, atol=0.1 if dtype == torch.bfloat16 else 1e-4, rtol=2**-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 70])
def test_queries_and_key_of_latent_attention_match_plain_torch(dtype: torch.dtype, tokens: int) -> None:
    absorbed, q, key, weight = (torch.randn(*shape).to(dtype) for shape in ((tokens, 3, 24), (tokens, 3, 20), (tokens, 32), (24,)))
    ours, theirs = (choose_ops(CPU, dtype, compiled=compiled).latent_heads(absorbed, q, key, weight, 1e-6) for compiled in (True, False))
    assert torch.equal(ours[:, :-1], theirs[:, :-1]) and torch.equal(ours[:, -1, 24:], theirs[:, -1, 24:])
    torch.testing.assert_close(ours, theirs)


def test_a_row_that_does_not_fit_the_matrices_is_refused() -> None:
    """A kernel finds them by their addresses, so it could not tell."""
    for precision in ("float32", "int8", "int4"):
        ops = choose_ops(CPU, torch.float32, compiled=True, products="baton")
        kind = precision if precision.startswith("int") else "auto"
        experts = SeparateExperts(COUNT, Weights(tensors().__getitem__, torch.float32, CPU, kind, ops=ops), ops.silu_mul, ops)
        assert experts.gate_up is not None
        with pytest.raises(ArgumentError, match="x: must be"):
            experts.gate_up(torch.zeros(1, HIDDEN + 32), torch.zeros(1, dtype=torch.int64))
        with pytest.raises(ArgumentError, match="owners: must be"):
            experts.gate_up(torch.zeros(2, HIDDEN), torch.zeros(3, dtype=torch.int64))
