"""train.accumulate and train.recompute need less memory for activations and give the same numbers as a whole batch."""

from typing import Any

import pytest
import torch
from checks import short
from data_parallel import exactly

import bace
from bace.config.parse import config_from
from bace.core import resources
from bace.errors import ConfigError
from bace.experiments.assemble import assemble
from bace.methods import METHODS, find_method
from bace.models.model import Model, read_rows

# methods whose batches cannot be read in parts
WHOLE = {"CODA-Prompt", "DualPrompt", "IDBR", "OWM", "MEMO", "L2P", "PODNet"}


def settings(tiny: Any, modality: str, method: str, **changes: object) -> Any:
    """Two tasks of one epoch: several steps with and without replay."""
    return tiny.settings(
        modality,
        method=short(method),
        **{"benchmark.tasks": [2, 3], "train.epochs": 1, "measure.fwt": False, **changes},
    )


def learned(tiny: Any, modality: str, method: str, **changes: object) -> tuple[dict[str, Any], Any]:
    result = bace.run(settings(tiny, modality, method, **changes))
    return dict(result.method.state_dict()), result


def check_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-9, equal_nan=True)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("method", [method.title for method in METHODS if "image" in method.modalities])
def test_every_method_learns_the_same(tiny: Any, method: str) -> None:
    """The runs use double precision, in which training does not amplify the order of sums. Dropout, which some adapters
    have, is drawn for each part of a batch; with it, blocks are recomputed but batches are not cut."""
    plain, once = learned(tiny, "image", method)
    drops = any(isinstance(module, torch.nn.Dropout) and module.p for module in once.method.model.modules())
    less = {"train.recompute": True} | ({} if method in WHOLE or drops else {"train.accumulate": 3})
    cut, again = learned(tiny, "image", method, **less)
    check_equal(cut, plain)
    assert again.matrix == once.matrix
    assert again.metrics["passes"] == once.metrics["passes"]  # recomputed passes are not part of the method's cost


@pytest.mark.parametrize("method", ["ER", *(method.title for method in METHODS if "image" not in method.modalities)])
def test_a_method_of_texts_or_entities_learns_the_same_without_dropout(tiny: Any, method: str) -> None:
    """ER learns texts. IDBR keeps the text that is nearest to the centre of a cluster; where two are equally near,
    rounding decides, so here it keeps any."""
    modality = "text" if method in ("ER", "IDBR") else "token"
    changes = {"memory.select": "random"} if method == "IDBR" else {}
    less = {"train.recompute": True} | ({} if method in WHOLE else {"train.accumulate": 3})
    with exactly():
        plain, once = learned(tiny, modality, method, **changes)
        cut, again = learned(tiny, modality, method, **changes, **less)
    check_equal(cut, plain)
    assert again.matrix == once.matrix
    assert again.metrics["passes"] == once.metrics["passes"]


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("modality", ["text", "token"])
def test_dropout_is_the_same_when_blocks_are_computed_again(tiny: Any, modality: str) -> None:
    plain, _ = learned(tiny, modality, "ER")
    check_equal(learned(tiny, modality, "ER", **{"train.recompute": True})[0], plain)


@pytest.mark.usefixtures("double")
def test_parts_of_sentences_give_the_gradient_of_the_whole_batch(tiny: Any) -> None:
    """A mean over words is not the mean of the parts' means, because sentences have different numbers of words."""
    method, stream = assemble(config_from(settings(tiny, "token", "SEQ")))
    method.grow(stream[0])
    method.model.eval()  # without dropout, which is drawn separately for each part
    stream.begin(stream[0], method.remembered())
    batch = stream.batch(stream[0].train[:7])

    def gradient() -> list[torch.Tensor]:
        loss = torch.nn.functional.cross_entropy(method.model(batch).logits, batch.targets)
        return list(torch.autograd.grad(loss, [p for p in method.model.parameters() if p.requires_grad]))

    whole = gradient()
    for method.model.encoder.pieces in (2, 7, 20):
        for found, expected in zip(gradient(), whole, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def kept(model: Model, batch: Any) -> int:
    """Bytes that a pass keeps for its backward pass."""
    sizes: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        rows, _ = read_rows(model.encoder, batch)
    assert rows.requires_grad
    return sum(size for pointer, size in sizes.items() if pointer not in parameters)


def test_less_is_kept_for_the_backward_pass(tiny: Any) -> None:
    method, stream = assemble(config_from(settings(tiny, "image", "SEQ")))
    stream.begin(stream[0], method.remembered())
    batch, encoder = stream.batch(stream[0].train[:8]), method.model.encoder
    whole = kept(method.model, batch)
    encoder.recompute = True
    blocks = kept(method.model, batch)
    encoder.recompute, encoder.pieces = False, 4
    parts = kept(method.model, batch)
    assert blocks < whole / 3
    assert parts < whole / 3


@pytest.mark.parametrize("method", sorted(WHOLE))
def test_a_method_that_needs_its_batch_whole_is_refused_by_name(tiny: Any, method: str) -> None:
    modality = "text" if method == "IDBR" else "image"
    with pytest.raises(ConfigError, match=f"{method} cannot read a batch in parts .train.accumulate is 2.: use train"):
        assemble(config_from(settings(tiny, modality, method, **{"train.accumulate": 2})))
    assert find_method(method).title == method


def test_a_network_with_a_pass_of_its_own_has_to_say_that_it_can_be_cut() -> None:
    class Own(Model):
        def branches(self, batch: Any, taps: bool) -> Any: ...

    class Declared(Own):
        in_pieces = True

        def forward(self, batch: Any, **options: Any) -> Any: ...

    assert (Model.in_pieces, Own.in_pieces, Declared.in_pieces) == (True, False, True)


def test_the_estimate_knows_of_both(tiny: Any) -> None:
    """The expected bytes are computed by hand: 5 tokens of width 16, 2 blocks, batches of 8, 4 bytes per number."""

    def estimate(**changes: object) -> int:
        method, _ = assemble(config_from(settings(tiny, "image", "SEQ", **changes)))
        return resources.bytes_of_activations(method)

    token = 5 * 16 * 4
    assert estimate() == 8 * token * 18 * 2
    assert estimate(**{"train.recompute": True}) == 8 * token * (18 + 2)
    assert estimate(**{"train.accumulate": 3}) == 3 * token * 18 * 2 + 5 * token
    assert estimate(**{"train.accumulate": 3, "train.recompute": True}) == 3 * token * (18 + 2) + 5 * token
    assert estimate(**{"backbone.freeze": 1}) == 8 * token * 18
    assert {estimate(**{"train.precision": half}) for half in ("bfloat16", "float16")} == {8 * token * 18}


OWN = {
    method.title: name
    for method in METHODS
    for name in method.hyper_parameters()
    if name.endswith("batch") and name != "head_batch"  # ROW's heads train on stored features
}


@pytest.mark.parametrize("method", OWN)
def test_the_estimate_is_that_of_the_largest_step(tiny: Any, method: str) -> None:
    """By default train.batch_size is 8; a stage may have larger or smaller batches of its own."""
    changes = {"benchmark.tasks": [2, 3], "measure.fwt": False}

    def estimate(own: int) -> int:
        chosen = {**short(method), OWN[method]: own}
        learned, _ = assemble(config_from(tiny.settings("image", method=chosen, **changes)))
        return resources.bytes_of_activations(learned)

    assert estimate(4) > 0
    assert estimate(24) == 3 * estimate(8) == 3 * estimate(4)


def test_the_estimate_is_told_before_a_run(tiny: Any) -> None:
    said: list[str] = []
    bace.run(settings(tiny, "image", "SEQ"), tell=said.append)
    assert "and more for activations (about 92.2 kB)" in said[0]
