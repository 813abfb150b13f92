"""SpecBlock (arXiv 2605.07243): one forward drafts a block of K dependent positions.

An anchor t is a position whose target features are known together with the next token. Its block has entries k = 1..K;
entry k stands at position t + k and predicts the token at t + k + 1. A block is emitted in six steps (sections 3.1 and
3.2; modules are in drafters/network unless another folder is given):

1. Input. `FusedInput` computes h0_k from the anchor's condition, the embedding of token t + 1 and the query of position
   k. While serving, `served_input` below computes the same for all K entries.
2. Forward. `BlockForward.first` (serving.py) runs the K entries of the newest anchor, in one forward with the committed
   entries that still wait. Entries attend to committed ones before the anchor, and causally within the block.
3. Dependence. Between two layers, h_k <- W_shift [h_k; h_{k-1}] with h_0 := h_1: `ServingNetwork._before_last`
   (served.py), in training `SpecBlock.forward` (model.py). Entry k depends on the state of entry k - 1, not on the
   token chosen there: a block has one distribution per position, which is used below rank 1 of the position before.
4. Heads. The output norm gives the final h_k and the draft head its logits. `propose` (heads.py) turns them into the
   scores by which tokens are ranked: log q, or log q / T + Gumbel noise at T > 0 (drafters/coupling.py). The rank head
   reads h_k and 15 features of the scores, and returns logits of the classes 1, 2-4, 5-10 and beyond for the rank of
   the target's token (`rank_logits` in served.py). `propose` divides the class
   probabilities among the ten candidates of each position.
5. Tree. `grow_lattice` (kernels/lattice.py) corrects these probabilities by learned factors (`RankCalibration.trust` in
   drafters/calibration.py) and multiplies them along each path. The first ranks of a block form its spine; ranks 2 to
   10 are leaves.
6. Chaining. If the setting `draft_blocks` allows more than one forward per tree (the default is 1) and it pays
   (`ForwardGates` in drafters/asking.py), further blocks start at the nodes where they gain most (`grow_lattice`). Such
   a block reads the drafter's own state at the node in place of the condition, and the node's token in place of token
   t + 1 (`BlockForward.next`). `TreeGrower` (blocks.py) runs steps 2 to 6 and merges all blocks into one tree.

Training (section 3.3) runs the same forwards (training/forward.py); entries after a token that could not have been
drafted have no loss (training/objective.py). Initial weights come from a regression, not from random numbers
(`FusedInput.solve`). Learning while serving (section 3.4) is in adaptation/.

Legend: rows, hidden, block = K, taps."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from drafters.network import form
from drafters.network.checkpoint import TargetParts, vocabulary
from drafters.network.config import DrafterConfig, Fields, NetworkTraits, RankHeadShape
from drafters.network.form import Described, PublishedForm, Tensors, TrainedKind
from drafters.network.layers import Input, LayerShape
from drafters.network.model import RANK_CLASSES
from drafters.network.serving import BlockForward
from drafters.network.structure import ServedFusedInput, ServedInput, Structure, WeightPlanner, feature_norms
from drafters.training.forward import TrainingForward
from drafters.training.initialise import InputSums

AUTHORS: Fields = {
    "prefix_entries": "all",
    "normalise_features": False,
    "normalise_rank_inputs": False,
    "coupled": False,
    "continues_from": "raw",
    "restarts": True,
    "rank_scores": 20,
    "rank_biases": False,
}
"""Options of the network that the authors published, as fields of `config.json`."""
_AUTHORS_RANK_HEAD = RankHeadShape(normalised=False, biases=False, scores=20)


@dataclass(frozen=True, slots=True)
class SpecBlockConfig(DrafterConfig):
    """Config of a SpecBlock drafter trained by this project or, with `as_published`, by the paper's authors."""

    kind: ClassVar[str] = "specblock"
    trained_blocks: ClassVar[int] = 2

    # "all", as in the paper, has K times the rows, without a measured gain (docs/training.md).
    prefix_entries: Literal["first", "all"] = "first"  # entries of a committed position to which later positions attend
    shift: bool = True  # False: ablation without the layer-wise shift
    broadcast: bool = True  # False: only the first entry of a block gets condition and token
    as_published: bool = False  # the authors' variant of the network, see AUTHORS

    def __post_init__(self) -> None:
        DrafterConfig.__post_init__(self)
        if self.prefix_entries not in ("first", "all"):
            raise ValueError("drafter config: prefix_entries must be 'first' or 'all'")
        least = self.traits.rank_head.scores
        if self.draft_vocab_size < least:
            raise ValueError(f"drafter config: draft_vocab_size must be at least {least}")

    def structure(self) -> Structure:
        return BlockStructure(self)

    @property
    def options(self) -> Fields:
        authors = AUTHORS if self.as_published else {}
        return {**super(SpecBlockConfig, self).options, **authors}

    @classmethod
    def options_of(cls, fields: Fields) -> Fields:
        return {**super(SpecBlockConfig, cls).options_of(fields), "as_published": fields["restarts"]}

    @property
    def traits(self) -> NetworkTraits:
        return NetworkTraits(
            normed_parts=0 if self.as_published else len(self.tap_layers),
            rank_head=_AUTHORS_RANK_HEAD if self.as_published else RankHeadShape(),
            shifts=self.num_layers - 1 if self.shift else 0,
            entries=self.block_size if self.prefix_entries == "all" else 1,
            continues_raw=self.as_published,
            restarts=self.as_published,
        )


class FusedInput(Input):
    """Input layer of blocks (section 3.1): h0_k = W_fuse [norm(c_t); norm(e(x_{t+1})); norm(q_k)], with the condition
    c_t = W_cond [h_low; h_mid; h_top] of the tapped features and a learned query q_k for each position of the block."""

    def __init__(self, config: DrafterConfig, shape: LayerShape) -> None:
        super().__init__()
        hidden, epsilon = config.hidden_size, shape.epsilon
        self.condition_proj = nn.Linear(config.features_size, hidden, bias=False)
        self.condition_norm = nn.RMSNorm(hidden, eps=epsilon)
        self.token_norm = nn.RMSNorm(hidden, eps=epsilon)
        self.position_queries = nn.Parameter(torch.randn(config.forward_size, hidden) * 0.02)
        self.query_norm = nn.RMSNorm(hidden, eps=epsilon)
        self.fuse = nn.Linear(3 * hidden, hidden, bias=False)
        self.feature_norms = feature_norms(config, epsilon)
        self._broadcast = config.described["broadcast"]  # all entries get condition and token, not only the first

    def blocks(self, context: Tensor, embedded: Tensor, entries: slice) -> Tensor:
        queries = self.query_norm(self.position_queries[entries])  # [entries, hidden]
        dtype = self.token_norm.weight.dtype  # not autocast's dtype: a norm of mixed dtypes is slow
        known = torch.cat([self.condition_norm(context.to(dtype)), self.token_norm(embedded.to(dtype))], dim=-1)
        seen = known[..., None, :].expand(*known.shape[:-1], queries.shape[0], -1)
        if not self._broadcast:
            is_first = torch.arange(self.position_queries.shape[0], device=known.device)[entries] == 0
            seen = seen * is_first[:, None]
        fused: Tensor = self.fuse(torch.cat([seen, queries.expand(*seen.shape[:-1], -1)], dim=-1))
        return fused

    @torch.no_grad()
    def solve(self, sums: InputSums, generator: torch.Generator) -> None:
        """Set all weights from the regression in `sums`. The norm between condition and fusion divides by a magnitude
        that hardly varies, so its mean is used. The regression's constant enters through the position queries, which
        `generator` draws close together."""
        hidden, solved = sums.hidden, sums.fused()
        for norm, own in zip(self.feature_norms, solved.deviations.split(hidden), strict=False):  # empty without norms
            norm.get_parameter("weight").copy_(1.0 / own)
        self.condition_proj.weight.copy_(solved.condition.T)
        self.condition_norm.weight.fill_(1.0)
        self.token_norm.weight.fill_(1.0)
        self.query_norm.weight.fill_(1.0)
        queries = 1.0 + _QUERY_SPREAD * torch.randn(self.position_queries.shape, generator=generator)
        queries[0] = 1.0
        self.position_queries.copy_(queries)
        self.fuse.weight[:, :hidden].copy_(solved.back.T)
        self.fuse.weight[:, hidden : 2 * hidden].copy_(solved.token.T)
        self.fuse.weight[:, 2 * hidden :].copy_((solved.constant / hidden)[:, None].expand(-1, hidden))


_QUERY_SPREAD = 0.3


class FusedStructure(Structure):
    """Structure of a network whose input layer is `FusedInput`."""

    def input_layer(self) -> Input:
        return FusedInput(self.config, self.shape)

    def served_input(self, planner: WeightPlanner) -> ServedInput:
        hidden, epsilon = self.shape.hidden, self.shape.epsilon
        condition_norm = planner.norm("input_layer.condition_norm.weight", epsilon)
        token_norm = planner.norm("input_layer.token_norm.weight", epsilon)
        fuse = planner.weights["input_layer.fuse.weight"]
        known = planner.product(fuse[:, : 2 * hidden].contiguous())
        queries = torch.rms_norm(planner.weights["input_layer.position_queries"], (hidden,), None, epsilon)
        queries = queries * planner.weights["input_layer.query_norm.weight"]
        # The queries' part of W_fuse [...] is the same in every block: it is computed once.
        added = linear(queries.float(), fuse[:, 2 * hidden :].float())
        added = planner.tensor(added.to(fuse.dtype))  # [block, hidden]
        return ServedFusedInput(condition_norm, token_norm, known, added, self.config.described["broadcast"])


class BlockStructure(FusedStructure):
    """Structure of the SpecBlock network."""

    serving = BlockForward
    training = TrainingForward


# Published form: files of the paper's authors.

_ARCHITECTURES = ("LlamaForCausalLMSpecBlock",), ("LlamaForCausalLMSpecBlockShift",)
"""Names of the same network: in the authors' training code, and in their fork of SGLang."""
_NAMES = {
    "input_layer.position_queries.weight": "input_layer.position_queries",
    "layers.": "decoder.layers.",
    "norm.": "decoder.norm.",
}


def _config(described: Described, tensors: Tensors, target: TargetParts) -> SpecBlockConfig:
    layers, depth = form.layers_of(described, target), target.config["num_hidden_layers"]
    form.refuse_set(described, ("target_hidden_size", "eagle_config"), layers["hidden_size"])
    if described["rank_classes"] != RANK_CLASSES:
        raise ValueError(f"its rank_classes is {described['rank_classes']}, only {RANK_CLASSES} is supported")
    _refuse_scaling(layers)
    return SpecBlockConfig(
        # Their code ignores the config's head_dim.
        {**layers, "head_dim": layers["hidden_size"] // layers["num_attention_heads"], "num_hidden_layers": depth},
        form.taps_of((1, depth // 2 - 1, depth - 4), target, first=0),  # the layers that their code taps
        described["draft_vocab_size"],
        num_layers=layers["num_hidden_layers"],
        block_size=described["diffspec_draft_token_num"],
        trained_length=layers["max_position_embeddings"],
        coupled=False,
        prefix_entries="all",
        as_published=True,
    )


def _refuse_scaling(layers: Mapping[str, Any]) -> None:
    """Raise ValueError for a rope scaling that the authors' code does not implement."""
    scaling = layers.get("rope_scaling") or layers.get("rope_parameters") or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in ("default", "llama3"):
        raise ValueError(f"its rope_scaling is {kind!r}, only 'llama3' is supported in this form")


def _weights(tensors: dict[str, Tensor], config: DrafterConfig, target: TargetParts) -> dict[str, Tensor]:
    form.drop_embedding(tensors, target, "input_layer.embed_tokens.weight")
    ranks = {name: tensors[name] for name in ("rank_head.0.weight", "rank_head.2.weight")}  # required in this form
    return {**vocabulary(tensors, config), **form.renamed(tensors, _NAMES), **ranks}


AUTHORS_FORM = PublishedForm(
    "specblock",
    lambda described: form.named(described) in _ARCHITECTURES,
    lambda _: "specblock",
    _config,
    _weights,
)

KIND = TrainedKind(SpecBlockConfig, {"block_size": 4, "num_layers": 2}, (AUTHORS_FORM,))
