"""The shape of a model: its dimensions, and from them its exact parameter counts.

Decoder-only transformers of six families, as presets by name or from the content of a Hugging Face
config.json. All share one form (token table, equal layers of attention and MLP with a norm each, head), and a
`ModelShape` is that form with its widths and switches. It knows no tokens, no gemms, no files and no weights:
`gemms.py` turns a shape into the work of a step; the caller opens the config.json for `from_config`.
"""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, get_args

from cleave.errors import ModelError

Family = Literal["llama", "mistral", "qwen2", "opt", "gpt2", "gpt_neox"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    name: str
    family: Family
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    max_positions: int
    tied_embeddings: bool
    """The head multiplies by the token table instead of a matrix of its own."""
    embed_dim: int
    """Width of the token table and the head; if not `hidden` (OPT-350M), two projections bridge them."""
    position_rows: int
    """Rows of the learned position table; 0 for rotary positions, two more than `max_positions` for OPT."""
    gated_mlp: bool
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    norm_vectors: int
    """Learned vectors per norm: 1 for RMSNorm, 2 for LayerNorm, 0 without scale and shift."""
    final_norm: bool
    adapter_rank: int = 0
    """Rank of LoRA adapters beside every linear layer of attention and MLP, all else frozen; 0: all is trained."""

    @property
    def q_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def attention_params(self) -> int:
        """Parameters of one layer's attention: projections, their biases, and its norm."""
        qkv = self.q_width + 2 * self.kv_width
        biases = qkv * self.qkv_bias + self.hidden * self.out_bias
        return self._attention_gemm_params + biases + self._norm_params

    @property
    def mlp_params(self) -> int:
        """Parameters of one layer's MLP: projections, their biases, and its norm."""
        inner = self.ffn * (2 if self.gated_mlp else 1)
        return self._mlp_gemm_params + (inner + self.hidden) * self.mlp_bias + self._norm_params

    @property
    def attention_adapter_params(self) -> int:
        """Parameters of the adapters of q, k, v and o; both sides of each."""
        return self.adapter_rank * (4 * self.hidden + 2 * self.q_width + 2 * self.kv_width)

    @property
    def mlp_adapter_params(self) -> int:
        return self.adapter_rank * (self.hidden + self.ffn) * (3 if self.gated_mlp else 2)

    @property
    def gemm_params_per_layer(self) -> int:
        """Weights of a layer that are operands of gemms: no biases, no norms."""
        return self._attention_gemm_params + self._mlp_gemm_params

    @property
    def params_per_layer(self) -> int:
        return self.attention_params + self.mlp_params

    @property
    def head_gemm_params(self) -> int:
        """Gemm weights outside the layers: the head, tied or not, and OPT-350M's two projections."""
        return self.vocab * self.embed_dim + self._projection_params

    @property
    def embedding_params(self) -> int:
        """Token table, an untied head, learned positions and OPT-350M's two projections."""
        tables = self.vocab * self.embed_dim * (1 if self.tied_embeddings else 2)
        return tables + self.position_rows * self.hidden + self._projection_params

    @property
    def final_norm_params(self) -> int:
        return self._norm_params * self.final_norm

    @property
    def params(self) -> int:
        return self.layers * self.params_per_layer + self.embedding_params + self.final_norm_params

    @property
    def _attention_gemm_params(self) -> int:
        return self.hidden * (2 * self.q_width + 2 * self.kv_width)

    @property
    def _mlp_gemm_params(self) -> int:
        return self.hidden * self.ffn * (3 if self.gated_mlp else 2)

    @property
    def _norm_params(self) -> int:
        return self.norm_vectors * self.hidden

    @property
    def _projection_params(self) -> int:
        return 2 * self.embed_dim * self.hidden if self.embed_dim != self.hidden else 0


def _sizes(layers: int, hidden: int, heads: int) -> dict[str, object]:
    return {"num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads}


def _opt_config(layers: int, hidden: int, heads: int) -> dict[str, object]:
    return _sizes(layers, hidden, heads) | {"model_type": "opt", "ffn_dim": 4 * hidden, "vocab_size": 50272}


def _llama_2_config(layers: int, hidden: int, ffn: int, heads: int, kv_heads: int) -> dict[str, object]:
    own = {"intermediate_size": ffn, "num_key_value_heads": kv_heads, "max_position_embeddings": 4096}
    return _sizes(layers, hidden, heads) | own | {"model_type": "llama", "vocab_size": 32000}


_PRESETS: dict[str, dict[str, object]] = {
    "opt-125m": _opt_config(12, 768, 12),
    "opt-350m": _opt_config(24, 1024, 16) | {"word_embed_proj_dim": 512, "do_layer_norm_before": False},
    "opt-1.3b": _opt_config(24, 2048, 32),
    "opt-2.7b": _opt_config(32, 2560, 32),
    "opt-6.7b": _opt_config(32, 4096, 32),
    "opt-13b": _opt_config(40, 5120, 40),
    "opt-30b": _opt_config(48, 7168, 56),
    "opt-66b": _opt_config(64, 9216, 72),
    "opt-175b": _opt_config(96, 12288, 96),
    "llama-2-7b": _llama_2_config(32, 4096, 11008, 32, 32),
    "llama-2-13b": _llama_2_config(40, 5120, 13824, 40, 40),
    "llama-2-70b": _llama_2_config(80, 8192, 28672, 64, 8),
}

PRESET_NAMES: tuple[str, ...] = tuple(_PRESETS)


def named(name: str) -> ModelShape:
    """The preset of that name, case-insensitive."""
    key = name.lower()
    if key not in _PRESETS:
        close = difflib.get_close_matches(key, PRESET_NAMES, n=1, cutoff=0.75)
        advice = f"did you mean {close[0]}?" if close else "give one of these names, or a path"
        expected = f"expected a path to config.json or a model name ({', '.join(PRESET_NAMES)})"
        raise ModelError(f"{expected}, got {reprlib.repr(name)}; {advice}")
    return from_config(_PRESETS[key], key)


def from_config(config: Mapping[str, object], name: str) -> ModelShape:
    """The shape of the causal language model that Hugging Face builds from the content of a config.json.

    The dimensions that make a model (layers, hidden, heads, ffn, vocabulary) are required: a silent default
    would plan another model. Any other missing field gets Hugging Face's default for the family.
    """
    fields = _Fields(name=name, values=config)
    family = fields.family()
    dialect = _DIALECTS[family]
    hidden, heads = fields.size(dialect.hidden), fields.size(dialect.heads)
    kv_heads, head_dim = _attention_heads(fields, family, hidden, heads)
    positions = fields.size(dialect.positions, absent=dialect.positions_if_absent)
    ffn_if_absent = 4 * hidden if family == "gpt2" else None
    qkv_bias, out_bias, mlp_bias = _biases(fields, family)
    shape = ModelShape(
        name=name,
        family=family,
        layers=fields.size(dialect.layers, most=_MOST_LAYERS),
        hidden=hidden,
        ffn=fields.size(dialect.ffn, absent=ffn_if_absent, null=ffn_if_absent),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab=fields.size("vocab_size"),
        max_positions=positions,
        tied_embeddings=fields.flag("tie_word_embeddings", absent=family in ("opt", "gpt2")),
        embed_dim=hidden,
        position_rows=positions if family == "gpt2" else 0,
        gated_mlp=family in _LLAMA_LIKE,
        qkv_bias=qkv_bias,
        out_bias=out_bias,
        mlp_bias=mlp_bias,
        norm_vectors=1 if family in _LLAMA_LIKE else 2,
        final_norm=True,
    )
    return _with_opt_fields(shape, fields) if family == "opt" else shape


@dataclass(frozen=True, slots=True)
class _Dialect:
    """How a family names the fields that all families have."""

    layers: str = "num_hidden_layers"
    hidden: str = "hidden_size"
    heads: str = "num_attention_heads"
    ffn: str = "intermediate_size"
    positions: str = "max_position_embeddings"
    positions_if_absent: int = 2048


_LLAMA_LIKE = ("llama", "mistral", "qwen2")
_DIALECTS: dict[Family, _Dialect] = {
    "llama": _Dialect(),
    "mistral": _Dialect(positions_if_absent=131072),
    "qwen2": _Dialect(positions_if_absent=32768),
    "opt": _Dialect(ffn="ffn_dim"),
    "gpt2": _Dialect("n_layer", "n_embd", "n_head", "n_inner", "n_positions", 1024),
    "gpt_neox": _Dialect(),
}


def _attention_heads(fields: _Fields, family: Family, hidden: int, heads: int) -> tuple[int, int]:
    """Key/value heads and the width of a head."""
    # With an explicit head_dim the division is not needed; Hugging Face's Llama still requires it.
    if family not in ("mistral", "qwen2") or fields.values.get("head_dim") is None:
        fields.check_divides(_DIALECTS[family].heads, heads, _DIALECTS[family].hidden, hidden)
    if family not in _LLAMA_LIKE:
        return heads, hidden // heads
    kv_heads_if_absent = {"mistral": 8, "qwen2": 32}.get(family, heads)
    kv_heads = fields.size("num_key_value_heads", absent=kv_heads_if_absent, null=heads)
    fields.check_divides("num_key_value_heads", kv_heads, "num_attention_heads", heads)
    return kv_heads, fields.size("head_dim", absent=hidden // heads, null=hidden // heads)


def _biases(fields: _Fields, family: Family) -> tuple[bool, bool, bool]:
    """Whether qkv, out and the MLP have biases."""
    match family:
        case "llama":
            attention = fields.flag("attention_bias", absent=False)
            return attention, attention, fields.flag("mlp_bias", absent=False)
        case "mistral" | "qwen2":
            return family == "qwen2", False, False
        case "opt":
            bias = fields.flag("enable_bias", absent=True)
            return bias, bias, bias
        case "gpt2":
            return True, True, True
        case "gpt_neox":
            attention = fields.flag("attention_bias", absent=True)
            return attention, attention, True


def _with_opt_fields(shape: ModelShape, fields: _Fields) -> ModelShape:
    pre_norm = fields.flag("do_layer_norm_before", absent=True)
    return replace(
        shape,
        embed_dim=fields.size("word_embed_proj_dim", absent=shape.hidden, null=shape.hidden),
        position_rows=shape.max_positions + 2,
        norm_vectors=2 if fields.flag("layer_norm_elementwise_affine", absent=True) else 0,
        final_norm=pre_norm and not fields.flag("_remove_final_layer_norm", absent=False),
    )


_LARGEST_SIZE = 2**31 - 1
_MOST_LAYERS = 1024  # planners list every layer; the deepest published models have some 130
_EXPERT_KEYS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fields:
    """The fields of one config.json, checked as they are read."""

    name: str
    values: Mapping[str, object]

    def family(self) -> Family:
        for key in _EXPERT_KEYS:
            if self.values.get(key) not in (None, 0, 1):
                raise self._error(key, "be absent (no mixture of experts)", "use a dense model")
        families: tuple[Family, ...] = get_args(Family)
        for family in families:
            if self.values.get("model_type") == family:
                return family
        raise self._error("model_type", f"be one of {', '.join(families)}", "use a model of these families")

    def size(self, key: str, *, absent: int | None = None, null: int | None = None, most: int = _LARGEST_SIZE) -> int:
        """A positive integer. A missing or null field gets the default given for it; without one it is an error."""
        value = self.values.get(key, absent)
        if value is None and key in self.values and null is not None:
            return null
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
            raise self._error(key, f"be a whole number from 1 to {most}", "correct that field")
        return value

    def flag(self, key: str, *, absent: bool) -> bool:
        value = self.values.get(key, absent)
        if not isinstance(value, bool):
            raise self._error(key, "be true or false", "correct that field")
        return value

    def check_divides(self, key: str, divisor: int, whole_key: str, whole: int) -> None:
        if whole % divisor != 0:
            got = f"{divisor}" if key in self.values else f"{divisor} by default"
            raise self._error(key, f"divide {whole_key} {whole}", "correct one of them", got=got)

    def _error(self, key: str, expected: str, advice: str, *, got: str | None = None) -> ModelError:
        if got is None:
            got = reprlib.repr(self.values[key]) if key in self.values else "nothing"
        return ModelError(f"expected {key} in the config.json of {self.name} to {expected}, got {got}; {advice}")
