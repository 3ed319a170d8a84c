"""Experts: which are chosen and with what share, and that each token is computed by its own experts however tokens are grouped."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from baton.engine.checkpoint import ExpertConfig
from baton.engine.moe import GroupedExperts, SeparateExperts, route
from baton.engine.ops import Ops
from baton.engine.weights import Weights

HIDDEN, INNER, COUNT = 16, 24, 6
LAYERS = frozenset({0})


def tensors() -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(5)
    shapes = {"gate_proj": (INNER, HIDDEN), "up_proj": (INNER, HIDDEN), "down_proj": (HIDDEN, INNER)}
    return {f"{i}.{name}.weight": torch.randn(shape, generator=random) for i in range(COUNT) for name, shape in shapes.items()}


@pytest.fixture(params=[SeparateExperts, GroupedExperts])
def experts(request: pytest.FixtureRequest) -> SeparateExperts | GroupedExperts:
    weights = Weights(tensors().__getitem__, torch.float32, torch.device("cpu"), "auto")
    made: SeparateExperts | GroupedExperts = request.param(COUNT, weights, Ops().silu_mul)
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


@pytest.mark.parametrize("used", [[0], [COUNT - 1], [1, 4]])
def test_results_are_right_when_some_experts_go_unused(experts: SeparateExperts | GroupedExperts, used: list[int]) -> None:
    torch.manual_seed(3)
    x, shares = torch.randn(9, HIDDEN), torch.rand(9, 1)
    chosen = torch.tensor(used)[torch.randint(len(used), (9, 1))]
    torch.testing.assert_close(experts(x, shares, chosen), by_token(x, shares, chosen), atol=2e-4, rtol=0)


def test_each_chosen_expert_computes_all_its_tokens_in_one_call() -> None:
    experts = SeparateExperts(COUNT, Weights(tensors().__getitem__, torch.float32, torch.device("cpu"), "auto"), Ops().silu_mul)
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


def chosen_shares(given: Tensor, config: ExpertConfig, bias: Tensor | None = None) -> dict[int, float]:
    shares, chosen = route(given, bias, config)
    return {expert: round(share, 5) for expert, share in zip(chosen[0].tolist(), shares[0].tolist(), strict=True)}


def test_the_most_probable_experts_are_chosen_with_their_probability_as_share() -> None:
    config = ExpertConfig(LAYERS, 4, 2, INNER)
    assert chosen_shares(logits(0.1, 0.4, 0.2, 0.3), config) == {1: 0.4, 3: 0.3}


def test_normalised_shares_sum_to_the_scale() -> None:
    config = ExpertConfig(LAYERS, 4, 2, INNER, normalised=True, scale=2.0)
    assert chosen_shares(logits(0.1, 0.5, 0.1, 0.3), config) == {1: 1.25, 3: 0.75}


def test_a_group_is_ranked_by_its_best_expert() -> None:
    config = ExpertConfig(LAYERS, 6, 2, INNER, groups=3, open_groups=1)
    assert chosen_shares(logits(0.2, 0.22, 0.25, 0.05, 0.21, 0.07), config) == {2: 0.25, 3: 0.05}


def test_with_sigmoids_a_group_is_ranked_by_its_two_best_experts() -> None:
    config = ExpertConfig(LAYERS, 6, 2, INNER, sigmoid=True, groups=3, open_groups=1)
    assert chosen_shares(sigmoid_logits(0.6, 0.5, 0.9, 0.1, 0.2, 0.2), config) == {0: 0.6, 1: 0.5}


def test_a_bias_affects_the_choice_but_not_the_shares() -> None:
    config = ExpertConfig(LAYERS, 4, 2, INNER, sigmoid=True, biased=True)
    given = sigmoid_logits(0.9, 0.5, 0.4, 0.3)
    assert chosen_shares(given, config, torch.zeros(4)) == {0: 0.9, 1: 0.5}
    assert chosen_shares(given, config, torch.tensor([0.0, 0.0, 0.0, 1.0])) == {3: 0.3, 0: 0.9}


def test_a_negative_bias_does_not_close_an_open_group() -> None:
    """A closed group must lose even to an open one whose biased scores are below zero."""
    config = ExpertConfig(LAYERS, 4, 2, INNER, sigmoid=True, biased=True, groups=2, open_groups=1)
    assert chosen_shares(sigmoid_logits(0.5, 0.4, 0.9, 0.8), config, torch.tensor([-1.0, -1.0, -3.0, -3.0])) == {0: 0.5, 1: 0.4}


def test_all_zero_scores_do_not_give_nan() -> None:
    config = ExpertConfig(LAYERS, 4, 2, INNER, sigmoid=True, normalised=True)
    shares, _ = route(torch.full((1, 4), -1e4), None, config)
    assert shares.tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize("groups", [1, 4])
def test_routing_no_tokens_returns_empty_tensors(groups: int) -> None:
    shares, chosen = route(torch.empty(0, 8), None, ExpertConfig(LAYERS, 8, 2, INNER, groups=groups, open_groups=1))
    assert shares.shape == chosen.shape == (0, 2)


@pytest.mark.parametrize("sigmoid", [False, True])
def test_each_token_is_routed_independently(sigmoid: bool) -> None:
    config = ExpertConfig(LAYERS, 8, 3, INNER, sigmoid=sigmoid, groups=4, open_groups=2, normalised=True)
    given = torch.randn(20, 8, generator=torch.Generator().manual_seed(1))
    shares, chosen = route(given, None, config)
    for i in range(20):
        alone = route(given[i : i + 1], None, config)
        assert torch.equal(alone[1][0], chosen[i])
        torch.testing.assert_close(alone[0][0], shares[i])
