"""Resident layers match transformers: outputs, input gradients and every weight gradient, for any chunk size."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.support.device_bench import Bench, Journey, assert_close
from torch import nn
from transformers import GPT2Config, LlamaConfig, MistralConfig, OPTConfig, Qwen2Config
from transformers.models.gpt2.modeling_gpt2 import GPT2Block
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding
from transformers.models.mistral.modeling_mistral import MistralDecoderLayer
from transformers.models.opt.modeling_opt import OPTDecoderLayer
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer

from cleave.core.model.batch import Matrix
from cleave.core.model.decoder import Attention, Mlp, Norm, Part, Weight
from cleave.device.kernels import Kernel, NumpyKernel, TorchKernel

HIDDEN, HEADS, KEY_HEADS, HEAD_DIM, INNER, ROWS, WINDOW = 32, 4, 2, 8, 44, 21, 6


class Layer:
    """A transformers layer, and the same layer as parts on a bench."""

    def __init__(self, name: str, kernel: Kernel) -> None:
        torch.manual_seed(1)
        self.bench, self.name = Bench(kernel), name
        self.numbers: dict[int, tuple[nn.Parameter, slice]] = {}
        common = {"hidden_size": HIDDEN, "intermediate_size": INNER, "num_attention_heads": HEADS}
        grouped = {**common, "num_key_value_heads": KEY_HEADS, "attn_implementation": "eager"}
        self.config = {
            "llama": lambda: LlamaConfig(**grouped),
            "mistral": lambda: MistralConfig(**grouped, sliding_window=WINDOW, head_dim=HEAD_DIM),
            "qwen2": lambda: Qwen2Config(**grouped),
            "opt": lambda: OPTConfig(
                hidden_size=HIDDEN, ffn_dim=INNER, num_attention_heads=HEADS, dropout=0.0, attn_implementation="eager"
            ),
            "gpt2": lambda: GPT2Config(
                n_embd=HIDDEN, n_inner=INNER, n_head=HEADS, resid_pdrop=0, attn_pdrop=0, attn_implementation="eager"
            ),
        }[name]()
        kind = {
            "llama": LlamaDecoderLayer,
            "mistral": MistralDecoderLayer,
            "qwen2": Qwen2DecoderLayer,
            "opt": OPTDecoderLayer,
            "gpt2": GPT2Block,
        }[name]
        self.module = kind(self.config, layer_idx=0)
        with torch.no_grad():
            for parameter in self.module.parameters():
                parameter.copy_(torch.randn_like(parameter) * 0.3 + (parameter.ndim == 1) * 0.5)
        self.parts: tuple[Part, ...] = {"opt": self.opt, "gpt2": self.gpt2}.get(name, self.llama)()

    @property
    def is_rotary(self) -> bool:
        return self.name in ("llama", "mistral", "qwen2")

    def rotary(self) -> tuple[torch.Tensor, torch.Tensor]:
        made = LlamaRotaryEmbedding(LlamaConfig(hidden_size=HIDDEN, num_attention_heads=HEADS))
        return made(torch.zeros(1, ROWS, HIDDEN), torch.arange(ROWS)[None])

    def expected(self, x: Matrix, dy: Matrix, mask: Matrix | None) -> tuple[Matrix, Matrix]:
        """Output and input gradient; weight gradients are left in the parameters."""
        entering = torch.from_numpy(x)[None].requires_grad_()
        rows, keys = torch.arange(ROWS)[:, None], torch.arange(ROWS)[None]
        seen = (keys <= rows) & (keys > rows - (WINDOW if self.name == "mistral" else ROWS))
        if mask is not None:
            seen = seen & (torch.from_numpy(mask) > 0)
        hidden = torch.zeros(ROWS, ROWS).masked_fill(~seen, torch.finfo(torch.float32).min)[None, None]
        extra = {"position_embeddings": self.rotary()} if self.is_rotary else {}
        y = self.module(entering, attention_mask=hidden, **extra)
        y = y[0] if isinstance(y, tuple) else y
        y.reshape(ROWS, HIDDEN).backward(torch.from_numpy(dy))
        assert entering.grad is not None
        return y.detach().numpy().reshape(ROWS, HIDDEN), entering.grad[0].numpy()

    def put(self, parameter: nn.Parameter, columns: slice = slice(None)) -> int:
        number = self.bench.put(parameter.detach()[..., columns].numpy())
        self.numbers[number] = parameter, columns
        return number

    def linear(self, module: nn.Module, columns: slice | None = None) -> Weight:
        if columns is not None:
            return Weight(
                weight=self.put(module.weight, columns), bias=self.put(module.bias, columns), is_transposed=True
            )
        bias = module.bias
        return Weight(weight=self.put(module.weight), bias=None if bias is None else self.put(bias))

    def norm(self, module: nn.Module) -> Norm:
        if isinstance(module, nn.LayerNorm):
            return Norm(kind="layer", eps=module.eps, weight=self.put(module.weight), bias=self.put(module.bias))
        return Norm(kind="rms", eps=module.variance_epsilon, weight=self.put(module.weight))

    def llama(self) -> tuple[Part, ...]:
        layer, attention = self.module, self.module.self_attn
        return (
            Attention(
                norm=self.norm(layer.input_layernorm),
                q=self.linear(attention.q_proj),
                k=self.linear(attention.k_proj),
                v=self.linear(attention.v_proj),
                o=self.linear(attention.o_proj),
                head_dim=HEAD_DIM,
                scale=HEAD_DIM**-0.5,
                is_rotary=True,
                window=WINDOW if self.name == "mistral" else None,
            ),
            Mlp(
                norm=self.norm(layer.post_attention_layernorm),
                up=self.linear(layer.mlp.up_proj),
                gate=self.linear(layer.mlp.gate_proj),
                down=self.linear(layer.mlp.down_proj),
                activation="silu",
            ),
        )

    def opt(self) -> tuple[Part, ...]:
        layer, attention = self.module, self.module.self_attn
        return (
            Attention(
                norm=self.norm(layer.self_attn_layer_norm),
                q=self.linear(attention.q_proj),
                k=self.linear(attention.k_proj),
                v=self.linear(attention.v_proj),
                o=self.linear(attention.out_proj),
                head_dim=HEAD_DIM,
                scale=HEAD_DIM**-0.5,
            ),
            Mlp(
                norm=self.norm(layer.final_layer_norm),
                up=self.linear(layer.fc1),
                down=self.linear(layer.fc2),
                activation="relu",
            ),
        )

    def gpt2(self) -> tuple[Part, ...]:
        layer = self.module
        q, k, v = (self.linear(layer.attn.c_attn, slice(i * HIDDEN, (i + 1) * HIDDEN)) for i in range(3))
        everything = slice(None)
        return (
            Attention(
                norm=self.norm(layer.ln_1),
                q=q,
                k=k,
                v=v,
                o=self.linear(layer.attn.c_proj, everything),
                head_dim=HEAD_DIM,
                scale=HEAD_DIM**-0.5,
            ),
            Mlp(
                norm=self.norm(layer.ln_2),
                up=self.linear(layer.mlp.c_fc, everything),
                down=self.linear(layer.mlp.c_proj, everything),
                activation="gelu_tanh",
            ),
        )


@pytest.mark.grid
@pytest.mark.parametrize("kernel", ["numpy", "torch"])
@pytest.mark.parametrize("chunk", [1, 5, 8, ROWS])
@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "opt", "gpt2"])
@pytest.mark.parametrize("is_padded", [False, True])
def test_chunks_through_resident_parts_match_the_transformers_layer(
    name: str, chunk: int, kernel: str, is_padded: bool
) -> None:
    layer = Layer(name, NumpyKernel() if kernel == "numpy" else TorchKernel("cpu"))
    rng = np.random.default_rng(chunk)
    x, dy = (rng.standard_normal((ROWS, HIDDEN), dtype=np.float32) for _ in range(2))
    mask = np.ones((1, ROWS), dtype=np.float32) if is_padded else None
    if mask is not None:  # not the first keys: transformers treats rows that see no key differently
        mask[:, [9, 10, 18, 19, 20]] = 0
    y, dx = layer.expected(x, dy, mask)
    rotary = torch.cat(layer.rotary(), dim=-1)[0].numpy() if layer.is_rotary else None
    journey = Journey(bench=layer.bench, parts=layer.parts, rotary=rotary, mask=mask)
    went = journey.go(x, dy, chunk, list(layer.numbers))
    assert_close(went.y, y)
    assert_close(went.dx, dx)
    for number, (parameter, columns) in layer.numbers.items():
        assert parameter.grad is not None
        assert_close(went.gradients[number], np.atleast_2d(parameter.grad[..., columns].numpy()))
