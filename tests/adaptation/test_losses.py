"""Divergences against torch's own, and the valid prefix against a plain loop."""

from dataclasses import replace

import torch
from torch.nn.functional import kl_div

from adaptation.losses import TextDivergence, anchor_divergence, rank_loss, untrained_rows
from adaptation.samples import example_of
from drafters.specblock.heads import rank_features
from drafters.training.corpus import Batch, Example
from tests.adaptation.samples import EMBED, HEAD, drafter, feedback

torch.set_num_threads(1)


def text(seed: int) -> Example:
    made = example_of(feedback(seed))
    assert made is not None
    return made


def test_the_divergence_from_the_anchor_is_torchs() -> None:
    generator = torch.Generator().manual_seed(0)
    ours, theirs = torch.randn(2, 7, 64, generator=generator)
    expected = kl_div(theirs.log_softmax(-1), ours.log_softmax(-1), reduction="batchmean", log_target=True)
    assert torch.allclose(anchor_divergence(ours, theirs), expected)
    assert anchor_divergence(ours, ours) == 0


def test_the_rank_head_learns_the_rank_of_the_targets_token() -> None:
    model = drafter()
    draft_labels = feedback(0).draft_labels
    logits = model.lm_head(draft_labels.states)
    with torch.no_grad():
        last_layer = model.rank_head.get_submodule("2")
        last_layer.get_parameter("weight").zero_()
        last_layer.get_parameter("bias").copy_(torch.tensor([50.0, 0.0, 0.0, 0.0]))
    features, ids = rank_features(logits.detach().log_softmax(-1))
    first = replace(draft_labels, tokens=model.d2t[logits.argmax(-1)])
    last = replace(draft_labels, tokens=torch.full_like(draft_labels.tokens, int((model.t2d < 0).nonzero()[0])))
    assert rank_loss(model, first, features, ids) < 1e-3
    assert rank_loss(model, last, features, ids) > 40


def test_a_block_teaches_as_far_as_the_anchor_could_have_drafted_it() -> None:
    anchor = drafter()
    divergence = TextDivergence(anchor, EMBED, untrained_rows(anchor, None), anchors=4)
    batch = Batch.of([text(0), text(1)], 8, "cpu")
    starts = divergence._starts(batch)
    states = torch.randn(2, 4, 4, 48, generator=torch.Generator().manual_seed(0))
    valid = divergence._valid(anchor, anchor.lm_head.weight, batch, starts, states)
    ranked = anchor.lm_head(states).topk(10).indices
    for line in range(2):
        for number, start in enumerate(starts[line].tolist()):
            reached = True
            for entry in range(4):
                place = start + 2 + entry
                labelled = bool(batch.label_index[line, place] >= 0)
                assert bool(valid[line, number, entry]) == (entry > 0 and reached and labelled)
                token = int(anchor.t2d[batch.tokens[line, min(place, batch.tokens.shape[1] - 1)]])
                reached = reached and token in ranked[line, number, entry].tolist()
    assert valid.any()


def test_rows_are_the_anchors_where_it_has_them_and_the_targets_elsewhere() -> None:
    deployed = drafter()
    rows = untrained_rows(deployed, HEAD)
    assert torch.equal(rows(deployed.d2t), deployed.lm_head.weight)
    foreign = (deployed.t2d < 0).nonzero()[:3, 0]
    mixed = torch.cat([foreign, deployed.d2t.flip(0)[3:]])
    assert torch.equal(rows(mixed)[:3], HEAD[foreign])
    assert torch.equal(rows(mixed)[3:], deployed.lm_head.weight.flip(0)[3:])
    assert torch.equal(untrained_rows(deployed, None)(deployed.d2t), deployed.lm_head.weight)
