"""A decoder that runs as a stack trains as it would locally: same losses, same gradients, whatever the batch."""

from __future__ import annotations

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from tests.support.decoders import NAMES, gpt2, llama, make, opt, tokens
from tests.support.local_columns import LocalColumns
from torch import nn

from cleave.errors import ModelError
from cleave.train.offload.distribute import distribute, undistribute


@pytest.fixture
def columns() -> LocalColumns:
    return LocalColumns()


def resident(model: nn.Module, columns: Any, **options: Any) -> Any:
    return distribute(model, columns, **{"offload": "always", "grain": "resident", **options})


def pair(name: str, columns: Any) -> tuple[Any, Any]:
    """The same model twice: on the fleet, and local."""
    reference = make(name)
    return resident(copy.deepcopy(reference), columns), reference


def padded(side: str, length: int = 12) -> dict[str, torch.Tensor]:
    """Three sequences, two of them shorter; labels only where there is no padding."""
    batch, mask = tokens(3, 3, length), torch.ones(3, length, dtype=torch.long)
    for row, pads in enumerate((0, 3, 7)):
        mask[row, slice(0, pads) if side == "left" else slice(length - pads, length)] = 0
    return {"input_ids": batch, "attention_mask": mask, "labels": batch.masked_fill(mask == 0, -100)}


def assert_same_gradients(model: nn.Module, reference: nn.Module, tolerance: float = 1e-5) -> None:
    """Compare gradients relative to their largest entry.

    A key bias shifts all scores of a query alike, so its gradient is zero up to rounding, and is left out.
    """
    for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None), name
        if theirs.grad is not None and not name.endswith("k_proj.bias"):
            assert ours.grad is not None
            assert ours.grad.dtype == theirs.grad.dtype
            off = (ours.grad - theirs.grad).abs().max() / theirs.grad.abs().max()
            assert off < tolerance, f"{name}: {off:.1e}"


def assert_trains_alike(model: nn.Module, reference: nn.Module, tolerance: float = 1e-5, **batch: Any) -> None:
    losses = [one(**batch).loss for one in (model, reference)]
    for loss in losses:
        loss.backward()
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=tolerance)
    assert_same_gradients(model, reference, tolerance)


@pytest.mark.parametrize("name", NAMES)
def test_the_loss_and_all_gradients_equal_torchs(name: str, columns: LocalColumns) -> None:
    model, reference = pair(name, columns)
    assert_trains_alike(model, reference, input_ids=tokens(0), labels=tokens(0))
    (stack, batch), *others = columns.passes
    assert stack.head is not None
    assert batch.wants_dx
    assert not others
    assert columns.products == 0


@pytest.mark.parametrize("name", NAMES)
def test_without_labels_hidden_states_come_back_and_gradients_go_in(name: str, columns: LocalColumns) -> None:
    model, reference = pair(name, columns)
    for one in (model, reference):
        one(input_ids=tokens(0)).logits[..., 1:5].square().sum().backward()
    assert_same_gradients(model, reference)
    assert [stack.head for stack, _ in columns.passes] == [None]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", NAMES)
def test_padding_changes_nothing(name: str, side: str, columns: LocalColumns) -> None:
    model, reference = pair(name, columns)
    assert_trains_alike(model, reference, **padded(side))
    (_, batch), *_ = columns.passes
    assert batch.mask is not None
    assert batch.mask.sum() == padded(side)["attention_mask"].sum()


@pytest.mark.parametrize("name", ["llama", "gpt2", "opt"])
def test_eager_attention_gives_the_same_results(name: str, columns: LocalColumns) -> None:
    model, reference = pair(name, columns)
    for one in (model, reference):
        one.set_attn_implementation("eager")
    assert_trains_alike(model, reference, **padded("right"))
    assert len(columns.passes) == 1
    for one in (model, reference):
        one.zero_grad()
    assert_trains_alike(model, reference, **padded("left"))
    assert len(columns.passes) == 1, "with eager attention, rows that see no key attend to all of them"


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_each_sequence_may_have_its_own_positions(name: str, columns: LocalColumns) -> None:
    model, reference = pair(name, columns)
    batch = {"input_ids": tokens(0), "labels": tokens(0), "attention_mask": torch.ones(2, 12)}
    assert_trains_alike(model, reference, **batch, position_ids=torch.arange(12) + torch.tensor([[0], [9]]))
    assert columns.passes[0][1].rotary is not None
    assert len(columns.passes[0][1].rotary) == 24
    for one in (model, reference):
        one.zero_grad()
    assert_trains_alike(model, reference, **batch, position_ids=(torch.arange(12) + 5).expand(2, -1))
    assert columns.passes[1][1].rotary is not None
    assert len(columns.passes[1][1].rotary) == 12


@pytest.mark.parametrize(
    "options",
    [
        {"num_items_in_batch": 31},
        {"num_items_in_batch": torch.tensor(31)},
        {"ignore_index": 7},
        {"shift_labels": tokens(5)},
    ],
    ids=["number", "tensor", "ignored", "shifted"],
)
def test_the_loss_is_normalized_as_in_transformers(options: dict[str, Any], columns: LocalColumns) -> None:
    model, reference = pair("llama", columns)
    assert_trains_alike(model, reference, input_ids=tokens(0), labels=tokens(0) % 9, **options)
    assert columns.passes[0][0].head is not None


def test_labels_that_torch_refuses_are_refused(columns: LocalColumns) -> None:
    model, reference = pair("llama", columns)
    for one in (model, reference):
        with pytest.raises(IndexError):
            one(input_ids=tokens(0), labels=tokens(0) + 60)
        assert one(input_ids=tokens(0), labels=torch.full((2, 12), -100)).loss.isnan()


def test_a_custom_loss_is_computed_by_the_model_itself(columns: LocalColumns) -> None:
    model, reference = pair("llama", columns)
    for one in (model, reference):
        one.loss_function = lambda logits, labels, **_: logits.square().mean()
    assert_trains_alike(model, reference, input_ids=tokens(0), labels=tokens(0))
    assert columns.passes[0][0].head is None


def test_gradients_accumulate_scaled_clipped_and_seen_by_hooks(columns: LocalColumns) -> None:
    model, reference = pair("qwen2", columns)
    seen: list[str] = []
    weight = model.model.layers[0].mlp.up_proj.weight
    weight.register_hook(lambda grad: seen.append("tensor"))
    weight.register_post_accumulate_grad_hook(lambda parameter: seen.append("accumulated"))
    norms = []
    for one in (model, reference):
        for index in range(2):
            (one(input_ids=tokens(index), labels=tokens(index)).loss / 3).backward()
        norms.append(nn.utils.clip_grad_norm_(one.parameters(), 0.5).item())
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    assert_same_gradients(model, reference)
    assert seen == ["tensor", "accumulated"] * 2


def test_a_retained_graph_may_run_backward_twice(columns: LocalColumns) -> None:
    model, reference = pair("gpt2", columns)
    for one in (model, reference):
        loss = one(input_ids=tokens(0), labels=tokens(0)).loss
        loss.backward(retain_graph=True)
        loss.backward()
    assert_same_gradients(model, reference)


def test_autograd_grad_returns_the_gradients_of_given_weights(columns: LocalColumns) -> None:
    found = []
    for one in pair("qwen2", columns):
        loss = one(input_ids=tokens(0), labels=tokens(0)).loss
        found.append(torch.autograd.grad(loss, [one.lm_head.weight, one.model.layers[0].mlp.up_proj.weight]))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_two_batches_may_be_in_flight_before_either_runs_backward(columns: LocalColumns) -> None:
    model, reference = pair("llama", columns)
    for one in (model, reference):
        one(input_ids=tokens(5))  # its gradient is never requested
        first, second = (one(input_ids=tokens(index)).logits for index in (0, 1))
        (first * second).mean().backward()
    assert_same_gradients(model, reference)
    assert len(columns.passes) == 3


def test_an_input_modified_before_backward_is_detected(columns: LocalColumns) -> None:
    model, _ = pair("llama", columns)
    x = torch.randn(2, 6, 16)
    loss = model(inputs_embeds=x, labels=tokens(0)[:, :6]).loss
    x.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_each_pass_uses_the_weights_of_the_last_step(columns: LocalColumns) -> None:
    model, reference = pair("llama", columns)
    losses: list[list[float]] = []
    for one in (model, reference):
        optimizer = torch.optim.AdamW(one.parameters(), 1e-2, fused=True)
        losses.append([])
        for _ in range(4):
            loss = one(input_ids=tokens(0), labels=tokens(0)).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[-1].append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert losses[0][-1] < losses[0][0]
    first, *later = [stack for stack, _ in columns.passes]
    assert all(stack is first for stack in later), "an unchanged model is one stack to the fleet"


@pytest.mark.parametrize("name", NAMES)
def test_evaluation_keeps_its_logits(name: str, columns: LocalColumns) -> None:
    model, reference = (one.eval() for one in pair(name, columns))
    with torch.no_grad():
        ours, theirs = (one(**padded("right"), use_cache=False) for one in (model, reference))
    assert ours.loss.item() == pytest.approx(theirs.loss.item(), rel=1e-5)
    torch.testing.assert_close(ours.logits, theirs.logits, rtol=1e-4, atol=1e-5)
    assert [(stack.head, batch.is_trained) for stack, batch in columns.passes] == [(None, False)]
    with torch.inference_mode():
        alone = model(input_ids=tokens(0), use_cache=False).logits
    torch.testing.assert_close(alone, reference(input_ids=tokens(0)).logits, rtol=1e-4, atol=1e-5)


def test_gradients_in_evaluation_mode_come_with_logits(columns: LocalColumns) -> None:
    model, reference = (one.eval() for one in pair("llama", columns))
    assert model(input_ids=tokens(0), labels=tokens(0)).logits is not None
    assert_trains_alike(model, reference, input_ids=tokens(0), labels=tokens(0))
    assert [stack.head for stack, _ in columns.passes] == [None, None]


@pytest.mark.parametrize("name", NAMES)
def test_generation_gives_the_same_tokens(name: str, columns: LocalColumns) -> None:
    model, reference = (one.eval() for one in pair(name, columns))
    settings = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(tokens(3), **settings), reference.generate(tokens(3), **settings))
    assert not columns.passes


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_hidden_states_and_attentions_are_returned_on_request(name: str, columns: LocalColumns) -> None:
    model, reference = pair(name, columns)
    for one in (model, reference):
        one.set_attn_implementation("eager")
    ours, theirs = (
        one(input_ids=tokens(0), labels=tokens(0), output_hidden_states=True, output_attentions=True)
        for one in (model, reference)
    )
    for kind in ("hidden_states", "attentions"):
        torch.testing.assert_close(ours[kind], theirs[kind], rtol=1e-4, atol=1e-5)
    assert not columns.passes
    assert_trains_alike(model, reference, input_ids=tokens(0), labels=tokens(0))  # with the hooks left behind by that
    assert len(columns.passes) == 1


def test_custom_masks_and_packed_sequences_go_gemm_by_gemm(columns: LocalColumns) -> None:
    model, reference = pair("llama", columns)
    own = torch.ones(2, 1, 12, 12, dtype=torch.bool)
    packed = torch.cat((torch.arange(5), torch.arange(7))).expand(2, -1)
    for options in ({"attention_mask": own}, {"position_ids": packed}, {"position_ids": packed, "use_cache": False}):
        for one in (model, reference):
            one.zero_grad()
        assert_trains_alike(model, reference, input_ids=tokens(0), labels=tokens(0), **options)
    assert not columns.passes
    assert columns.products > 0


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_computes_nothing_twice(reentrant: bool, columns: LocalColumns) -> None:
    model, reference = pair("qwen2", columns)
    for one in (model, reference):
        one.gradient_checkpointing_enable({"use_reentrant": reentrant})
        one.enable_input_require_grads()
    assert_trains_alike(model, reference, input_ids=tokens(0), labels=tokens(0))
    assert len(columns.passes) == 1
    columns.refusal = "not today"
    for one in (model, reference):
        one.zero_grad()
    assert_trains_alike(model, reference, input_ids=tokens(0), labels=tokens(0))
    assert len(columns.passes) == 1


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_autocast_rounds_no_worse_than_torch(name: str, columns: LocalColumns) -> None:
    model, reference = pair(name, columns)
    for one in (model, reference):
        with torch.autocast("cpu", torch.bfloat16):
            loss = one(input_ids=tokens(0), labels=tokens(0)).loss
        assert loss.dtype == torch.float32
        loss.backward()
    exact = make(name)
    exact(input_ids=tokens(0), labels=tokens(0)).loss.backward()
    for ours, theirs, right in zip(model.parameters(), reference.parameters(), exact.parameters(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        assert right.grad is not None
        off, usual = ((one.grad - right.grad).norm() for one in (ours, theirs))
        assert off < 2 * usual + 1e-4 * right.grad.norm()
    formats = {operand.format for operand in columns.passes[0][1].operands if operand.rows > 1}
    assert formats == {"bf16"}


def test_half_precision_parameters_are_sent_as_they_are_and_get_half_precision_gradients(columns: LocalColumns) -> None:
    model, reference = (one.to(torch.bfloat16) for one in pair("llama", columns))
    assert_trains_alike(model, reference, 0.1, input_ids=tokens(0), labels=tokens(0))
    assert {operand.format for operand in columns.passes[0][1].operands} == {"bf16"}
    assert model.eval()(input_ids=tokens(0), use_cache=False).logits.dtype == torch.bfloat16


def test_vectors_stay_fp32_on_a_narrow_wire() -> None:
    columns = LocalColumns(wire="q8")
    model, reference = pair("opt", columns)
    ours, theirs = (one(input_ids=tokens(0), labels=tokens(0)).loss.item() for one in (model, reference))
    assert ours == pytest.approx(theirs, rel=0.05)
    assert {(min(operand.rows, 2), operand.format) for operand in columns.passes[0][1].operands} == {
        (1, "fp32"),
        (2, "q8"),
    }


def test_gradients_of_logits_keep_16_bits_on_an_8_bit_wire() -> None:
    columns = _Formats(wire="q8")
    model = make("llama")
    distribute(model, columns, grain="gemm", offload="always")
    model(input_ids=tokens(0), labels=tokens(0)).loss.backward()
    vocabulary = model.config.vocab_size
    dy_of_head = {(role, *formats) for role, cols, formats in columns.seen if role != "forward" and cols == vocabulary}
    assert dy_of_head == {("grad_input", "bf16", "q8"), ("grad_weight", "bf16", "q8")}
    assert {formats for role, cols, formats in columns.seen if role == "forward" or cols != vocabulary} == {
        ("q8", "q8")
    }


@dataclass
class _Formats(LocalColumns):
    """Records the role, the width of the first operand, and the formats of it and of the result."""

    seen: list[tuple[str, int, tuple[str, str]]] = field(default_factory=list)

    def submit(self, role: Any, a: Any, b: Any, plan: Any, **options: Any) -> Any:
        self.seen.append((role, a[0].cols, (a[0].format, options["format"])))
        return super().submit(role, a, b, plan, **options)


def test_frozen_parameters_get_no_gradient(columns: LocalColumns) -> None:
    model, reference = pair("llama", columns)
    for one in (model, reference):
        one.requires_grad_(False)
        one.model.layers[1].mlp.requires_grad_(True)
    assert_trains_alike(model, reference, input_ids=tokens(0), labels=tokens(0))
    stack, batch = columns.passes[0]
    assert sum(parameter.is_trained for parameter in stack.parameters) == 3
    assert not batch.wants_dx


def test_micro_batches_in_threads_give_the_same_gradients(columns: LocalColumns) -> None:
    model, reference = pair("llama", columns)

    def work(one: Any, index: int) -> None:
        labels = {"labels": tokens(index)} if index % 2 else {}
        output = one(input_ids=tokens(index), use_cache=False, **labels)
        (output.loss if labels else output.logits.square().mean()).backward()

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda index: work(model, index), range(6)))
    for index in range(6):
        work(reference, index)
    assert_same_gradients(model, reference, 1e-4)
    assert len(columns.passes) == 6


def test_a_base_model_alone_runs_as_a_stack(columns: LocalColumns) -> None:
    reference: Any = make("opt")
    model = resident(copy.deepcopy(reference).model, columns)
    for one in (model, reference.model):
        one(input_ids=tokens(0)).last_hidden_state.square().sum().backward()
    assert_same_gradients(model, reference.model)
    assert len(columns.passes) == 1


def test_a_layer_called_directly_computes_locally(columns: LocalColumns) -> None:
    model, reference = pair("opt", columns)
    x = torch.randn(2, 5, 16)
    ours, theirs = (one.model.decoder.layers[0](x) for one in (model, reference))
    torch.testing.assert_close(ours, theirs)


# ------------------------------------------------------------------------------------------------ copies, undoing


def test_copies_and_pickles_compute_locally(columns: LocalColumns) -> None:
    model, reference = pair("llama", columns)
    copied, pickled = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    for one in (copied, pickled):
        assert one(input_ids=tokens(0), labels=tokens(0)).logits is not None
    assert not columns.passes
    assert_trains_alike(copied, reference, input_ids=tokens(0), labels=tokens(0))


def test_undistribute_leaves_no_trace(columns: LocalColumns) -> None:
    reference = make("gpt2")
    model = copy.deepcopy(reference)
    names = [str(type(module)) for module in model.modules()]
    keys = list(model.state_dict())
    resident(model, columns)
    assert list(model.state_dict()) == keys
    assert type(model).__name__ == "GPT2LMHeadModel", "save_pretrained and Trainer look at the name"
    undistribute(model)
    assert [str(type(module)) for module in model.modules()] == names
    assert not any("cleave" in name for module in model.modules() for name in vars(module))
    assert_trains_alike(model, reference, input_ids=tokens(0), labels=tokens(0))
    assert not columns.passes
    assert not columns.products


def test_distributing_again_replaces_the_fleet(columns: LocalColumns) -> None:
    model, other = make("llama"), LocalColumns()
    resident(model, columns)
    resident(model, other)
    model(input_ids=tokens(0), labels=tokens(0)).loss.backward()
    distribute(model, other, offload="always", grain="gemm")
    model(input_ids=tokens(0), labels=tokens(0)).loss.backward()
    assert (len(columns.passes), len(other.passes)) == (0, 1)
    assert other.products > 0


# ------------------------------------------------------------------------------------------------ fallbacks


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (lambda: opt(dropout=0.1), "dropout 0.1"),
        (lambda: gpt2(resid_pdrop=0.2), "dropout 0.2.*resid_pdrop=0.0"),
        (lambda: llama(attention_dropout=0.3), "dropout 0.3"),
        (lambda: llama(hidden_act="gelu_10"), "activation"),
        (lambda: opt(do_layer_norm_before=False), "norms come after"),
        (lambda: opt(layerdrop=0.5), "layerdrop"),
        (lambda: nn.Sequential(nn.Linear(4, 4)), "no decoder of a known family"),
    ],
)
def test_models_that_cannot_run_as_stacks_say_why_and_train_by_gemms(
    model: Any, reason: str, columns: LocalColumns
) -> None:
    with pytest.raises(ModelError, match=reason):
        resident(model().train(), columns)
    said: list[Any] = []
    torch.manual_seed(1)
    trained: Any = resident(model().train(), columns, grain="auto", tell=said.append)
    if hasattr(trained, "config"):
        for _ in range(2):
            trained(input_ids=tokens(0), labels=tokens(0)).loss.backward()
        assert columns.products > 0
        assert len(said) == 1
    assert not columns.passes


def test_dropout_does_not_prevent_the_stack_in_evaluation(columns: LocalColumns) -> None:
    model: Any = resident(opt(dropout=0.1).train(), columns, grain="auto").eval()
    with torch.no_grad():
        model(input_ids=tokens(0), use_cache=False)
    assert len(columns.passes) == 1


def test_hooks_inside_layers_still_run(columns: LocalColumns) -> None:
    model, reference = pair("llama", columns)
    seen: list[torch.Size] = []
    hook = model.model.layers[1].mlp.register_forward_hook(lambda module, args, output: seen.append(output.shape))
    assert_trains_alike(model, reference, input_ids=tokens(0), labels=tokens(0))
    assert seen == [torch.Size([2, 12, 16])]
    assert not columns.passes
    hook.remove()
    model(input_ids=tokens(0), labels=tokens(0))
    assert len(columns.passes) == 1


def test_when_the_head_cannot_run_remotely_the_layers_still_do(columns: LocalColumns) -> None:
    said: list[Any] = []
    model: Any = resident(make("llama"), columns, tell=said.append)
    reference = make("llama")
    seen: list[torch.Size] = []
    model.lm_head.register_forward_hook(lambda module, args, output: seen.append(output.shape))
    for _ in range(2):
        model.zero_grad()
        reference.zero_grad()
        assert_trains_alike(model, reference, input_ids=tokens(0), labels=tokens(0))
    assert seen == [torch.Size([2, 12, 61])] * 2
    assert [stack.head for stack, _ in columns.passes] == [None, None]
    assert len(said) == 1
    assert "the loss is computed on the server" in str(said[0])


def test_a_requested_cache_is_returned(columns: LocalColumns) -> None:
    said: list[Any] = []
    model: Any = resident(make("llama"), columns, tell=said.append)
    output = model(input_ids=tokens(0), labels=tokens(0), use_cache=True)
    assert output.past_key_values.get_seq_length() == 12
    assert output.logits is not None
    assert "use_cache=False" in str(said[0])
    assert not columns.passes


def test_a_fleet_that_refuses_a_stack_gets_gemms(columns: LocalColumns) -> None:
    columns.refusal = "gemms take 2 s, the stack 3 s"
    model, reference = pair("llama", columns)
    assert_trains_alike(model, reference, input_ids=tokens(0), labels=tokens(0))
    assert not columns.passes
    assert columns.products > 0
