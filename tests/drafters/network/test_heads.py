"""What the heads propose: rank features by definition, chances that sum up, and coupling to the sampling noise."""

from dataclasses import replace
from itertools import product
from math import prod

import pytest
import torch

from drafters.coupling import TreeNoise, least_kept
from drafters.network.blocks import path_nodes
from drafters.network.checkpoint import weights_of
from drafters.network.heads import propose, rank_features
from drafters.network.served import ServingNetwork
from drafters.protocol import Noise
from drafters.trained.specblock import AUTHORS
from drafters.trained_kinds import trained_kind
from drafters.tree import ROOT
from kernels import ops
from kernels.families import OF_DRAFTERS
from kernels.lattice import TOP, StartNodes
from kernels.sample import Filters
from tests.drafters.network.parts import DRAFT_VOCAB, computed, serves, serving, tiny_drafter
from tests.tiny_models import VOCAB_SIZE

spread = ops.on(torch.device("cpu")).spread_classes


def noise(temperature: float, batch: int = 2) -> Noise:
    return Noise(
        seeds=torch.arange(batch) + 11,
        temperatures=torch.full((batch,), temperature),
        positions=torch.arange(batch) * 5 + 30,
    )


@pytest.mark.parametrize("likeliest", [0, 20, TOP])
def test_features_are_what_the_paper_lists(likeliest: int) -> None:
    """Of all tokens, or of the likeliest as if there were no others."""
    scores = torch.randn(3, 40, generator=torch.Generator().manual_seed(0))
    features, ids = rank_features(scores, likeliest)
    least = scores.sort(-1, descending=True).values[:, likeliest - 1 :][:, :1]
    logs = scores.masked_fill(scores < least, -1e9).log_softmax(-1)
    ordered = logs.sort(-1, descending=True)
    assert ids.tolist() == ordered.indices[:, :TOP].tolist()
    expected = torch.cat(
        [
            ordered.values[:, :TOP],
            ordered.values[:, :1] - ordered.values[:, [1, 2, 4]],
            ordered.values[:, :1].exp(),
            -(logs.exp() * logs).sum(-1, keepdim=True),
        ],
        dim=-1,
    )
    assert features.shape == (3, 15)
    assert (features - expected).abs().max() < 1e-5


def test_a_rank_head_that_reads_the_likeliest_scores_does_not_change_the_draft() -> None:
    """The authors' rank head reads 20 of them."""
    states, depths = torch.randn(2, 1, 4, 48), torch.arange(1, 5).expand(2, 1, 4)
    network = serving(tiny_drafter(**AUTHORS))
    found = propose(network, states, depths, TreeNoise.of(noise(0.0), 4, network.d2t))
    whole, few = (rank_features(found.logits, scores)[0] for scores in (0, 20))
    classes, of_whole = network.rank_logits(states, few), network.rank_logits(states, whole)
    assert torch.equal(found.predicted, spread(classes, whole))
    assert (classes - of_whole).abs().max() > 1e-3
    with pytest.raises(ValueError, match="rank_scores must be 20, not 12, for kind specblock"):
        tiny_drafter(**{**AUTHORS, "rank_scores": 12})
    with pytest.raises(ValueError, match="draft_vocab_size must be at least 20"):
        tiny_drafter(**AUTHORS, draft_vocab_size=19)


def test_chances_of_a_class_are_spread_by_draft_probability() -> None:
    draft = torch.tensor([0.4, 0.2, 0.1, 0.1, 0.05, 0.05, 0.02, 0.02, 0.02, 0.02])
    classes = torch.tensor([0.5, 0.3, 0.1, 0.1])
    chances = spread(classes.log(), draft.log())
    assert torch.allclose(chances[0], torch.tensor(0.5))
    assert torch.allclose(chances[1:4], torch.tensor([0.15, 0.075, 0.075]))
    assert torch.allclose(chances[4:].sum(), torch.tensor(0.1))


def test_no_rank_is_ever_certain_or_negative() -> None:
    generator = torch.Generator().manual_seed(1)
    draft = torch.rand(50, 4, TOP, generator=generator).sort(-1, descending=True).values
    logprobs, logits = (draft / draft.sum(-1, keepdim=True)).log(), torch.rand(50, 4, 4, generator=generator)
    sure = spread(torch.eye(4)[0].expand(1, 4, 4) * 100, torch.eye(TOP)[0].expand(1, 4, TOP).log())
    for conditional in (spread(logits, logprobs), sure):
        assert (conditional >= 0).all()
        assert (conditional < 1).all()


def test_at_temperature_zero_noise_plays_no_part() -> None:
    model = tiny_drafter()
    logits = torch.randn(2, 1, 4, DRAFT_VOCAB)
    depths = torch.arange(1, 5).expand(2, 1, 4)
    scores = TreeNoise.of(noise(0.0), 8, model.d2t).scores(logits.log_softmax(-1), depths)
    assert torch.equal(scores, logits.log_softmax(-1))


def test_a_drafter_that_knows_the_target_proposes_what_the_noise_will_select() -> None:
    """With equal distributions the first rank is the target's own choice, at every depth and temperature."""
    model = tiny_drafter()
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(2, 1, 4, DRAFT_VOCAB, generator=generator)
    depths = torch.tensor([[[1, 2, 3, 4]], [[3, 4, 5, 6]]])
    for temperature in (0.5, 1.0, 1.4):
        keys = noise(temperature)
        scores = TreeNoise.of(keys, 8, model.d2t).scores(logits.log_softmax(-1), depths)
        proposed = model.d2t[scores.argmax(-1)]
        everything = torch.full((2, 1, 4, VOCAB_SIZE), -torch.inf)
        everything[..., model.d2t] = logits
        for line in range(2):
            for place in range(4):
                position = keys.positions[line] + depths[line, 0, place]
                gumbel = ops.gumbel_noise_of(keys.seeds[line : line + 1], position[None], torch.arange(VOCAB_SIZE))[0]
                chosen = (everything[line, 0, place] / temperature + gumbel).argmax()
                assert proposed[line, 0, place] == chosen


@pytest.mark.parametrize(
    ("log_min_p", "top_k", "top_p"), [(-torch.inf, 5, 1.0), (-1.0, 0, 1.0), (-torch.inf, 0, 0.5), (-2.0, 6, 0.7)]
)
def test_what_filters_would_drop_is_lowered(log_min_p: float, top_k: int, top_p: float) -> None:
    """What the target samples never is, if the drafter has the target's distribution."""
    model, keys = tiny_drafter(), noise(1.3, batch=3)
    keys.temperatures[2] = 0.0
    filters = Filters(torch.full((3,), log_min_p), torch.full((3,), top_k), torch.full((3,), top_p).double())
    logits = torch.randn(3, 1, 4, DRAFT_VOCAB, generator=torch.Generator().manual_seed(4)) * 2
    depths = torch.arange(1, 5).expand(3, 1, 4)
    known = TreeNoise.of(replace(keys, filters=filters), 8, model.d2t)
    scaled, plain = logits / 1.3, TreeNoise.of(keys, 8, model.d2t).scores(logits, depths)
    lowered = known.scores(logits, depths) < plain - 1.0
    assert not lowered[2].any()
    assert lowered[:2].equal((scaled < least_kept(scaled, filters)[..., None])[:2])
    assert lowered[:2].any(-1).all()
    everything = torch.full((12, VOCAB_SIZE), -torch.inf)
    everything[:, model.d2t] = logits.flatten(0, 2)
    positions = (keys.positions[:, None] + depths[:, 0]).flatten()
    lines = torch.arange(3).repeat_interleave(4)
    target = ops.REFERENCE.sample(everything, keys.seeds[lines], positions, keys.temperatures[lines], filters.of(lines))
    chosen = (model.d2t == target.tokens[:, None]).view_as(lowered)
    assert not lowered[chosen].any()
    ranked = scaled[:2].sort(-1, descending=True).values.log_softmax(-1)  # by hand
    kept = ranked >= ranked[..., :1] + log_min_p
    kept[..., top_k or DRAFT_VOCAB :] = False
    mass = ranked.masked_fill(~kept, -torch.inf).softmax(-1)
    kept &= mass.cumsum(-1) - mass < top_p
    assert (~lowered[:2]).sum(-1).equal(kept.sum(-1))
    off = TreeNoise.of(replace(keys, filters=Filters.off(keys.seeds)), 8, model.d2t)
    assert off.scores(logits, depths).equal(plain)


def test_sequences_of_a_batch_keep_their_own_temperature() -> None:
    model = tiny_drafter()
    states = torch.randn(2, 1, 4, 48, generator=torch.Generator().manual_seed(3))
    depths = torch.arange(1, 5).expand(2, 1, 4)
    mixed = noise(1.0)
    mixed.temperatures[0] = 0.0
    both = propose(serving(model), states, depths, TreeNoise.of(mixed, 8, model.d2t))
    cold = propose(serving(model), states, depths, TreeNoise.of(noise(0.0), 8, model.d2t))
    warm = propose(serving(model), states, depths, TreeNoise.of(noise(1.0), 8, model.d2t))
    assert both.tokens[0].equal(cold.tokens[0])
    assert both.tokens[1].equal(warm.tokens[1])
    assert not warm.tokens[1].equal(cold.tokens[1])


# The network that serves: weights that come later, in the place of the first or in places of their own.


@pytest.fixture(params=[False, True], ids=["elsewhere", "in place"])
def in_place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """In place with products that read weights where they are, as kernels of a GPU do."""
    if request.param:
        monkeypatch.setattr(ops, "_table", lambda device_type: ops.REFERENCE)
    return bool(request.param)


@pytest.mark.parametrize("family", OF_DRAFTERS)
@pytest.mark.parametrize("kind", ["specblock", "treeflash"])
def test_other_weights_serve_once_they_are_written(family: str, kind: str, in_place: bool) -> None:
    models = [tiny_drafter(family, seed, kind=kind, **trained_kind(kind).shape) for seed in (0, 1)]
    first, second = map(weights_of, models)
    network = ServingNetwork(models[0].config, first, in_place=in_place)
    assert serves(network, first)
    write = network.prepare(second)
    assert serves(network, first)
    write()
    assert serves(network, second)
    assert not serves(network, first)
    network.prepare(first)()
    assert serves(network, first)


def test_in_place_ops_read_where_they_read_before() -> None:
    """As a captured graph does, which knows addresses only."""
    network = ServingNetwork(tiny_drafter().config, weights_of(tiny_drafter()), in_place=True)
    planned = network._planned
    network.prepare(weights_of(tiny_drafter(seed=1)))()
    assert network._planned is planned


def test_weights_that_are_brought_are_left_as_they_are(in_place: bool) -> None:
    first, second = (weights_of(tiny_drafter(seed=seed)) for seed in (0, 1))
    before = {name: value.clone() for name, value in first.items()}
    network = ServingNetwork(tiny_drafter().config, first, in_place=in_place)
    network.prepare(second)()
    computed(network)
    assert all(torch.equal(value, before[name]) for name, value in first.items())


# Nodes of a block whose distributions do not depend on the path.


def test_the_likeliest_paths_go_on() -> None:
    """Its likeliest nodes are those of all paths there are, each under its parent."""
    block, ranks, paths, most = 4, 5, 4, 12
    odds = torch.rand(2, 1, block, ranks, generator=torch.Generator().manual_seed(0)) * 0.9
    tokens = (10 * torch.arange(block)[:, None] + torch.arange(ranks)).expand(2, 1, -1, -1)
    trust = torch.linspace(0.8, 1.05, block * ranks).view(block, ranks)
    spoken, parents, depths, survival = path_nodes(
        StartNodes.root(2, odds.device), tokens, odds, trust, 0.0, paths=paths
    )
    odds = odds * trust
    for line in range(2):
        every = {
            tuple(10 * place + rank for place, rank in enumerate(path)): prod(
                float(odds[line, 0, place, rank]) for place, rank in enumerate(path)
            )
            for depth in range(1, block + 1)
            for path in product(range(ranks), repeat=depth)
        }
        likeliest = sorted(every, key=lambda path: -every[path])[:most]
        found = {}
        for node in survival[line].argsort(descending=True)[:most].tolist():
            path, above = [], node
            while above != ROOT:
                path.append(int(spoken[line, above]))
                assert depths[line, above] == depths[line, node] - len(path) + 1
                above = int(parents[line, above])
            found[tuple(reversed(path))] = float(survival[line, node])
        assert list(found) == likeliest
        assert all(abs(found[path] - every[path]) < 1e-6 for path in likeliest)
