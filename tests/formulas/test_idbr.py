"""IDBR's loss in ordinary steps and in rounds of replay is compared with numpy, halves of texts with plain Python on
lists of tokens, rounds with the memory's contents, and the texts nearest to cluster centres with scikit-learn. It
resumes exactly between rounds."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checks import check_resume_equals_the_straight_run, counted_run
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import pairwise_distances_argmin_min
from steps import Array, array, at_task, cross_entropy, make, recorded_passes, take_step, weights
from torch import Tensor

from bace.core.trainer import Trainer
from bace.data.batch import Batch
from bace.errors import ConfigError
from bace.methods.idbr import IDBR, Halves, central, halve
from bace.randomness import generator

CLS, SEP = 2, 3


def idbr(**changes: Any) -> dict[str, Any]:
    return {"name": "idbr", "hidden": 6, "warmup": 0, **changes}


def some(method: Any, count: int = 5, step: int = 0) -> Batch:
    """Return the first texts of the current task, as the trainer would give them to `expand`."""
    method.now.step, method.now.steps = step, 100
    found: Batch = method.stream.batch(method.stream[method.now.task].train[:count])
    return found


def linear(reader: Any, features: Array) -> Array:
    head = reader.head
    rows, biases = (np.concatenate([array(b) for b in blocks]) for blocks in (head.blocks, head.biases))
    result: Array = features @ rows.T + biases
    return result


# -- halves of a text


def tokens(inputs: dict[str, Tensor], i: int) -> list[int]:
    found: list[int] = inputs["input_ids"][i][inputs["attention_mask"][i].bool()].tolist()
    return found


def in_halves(text: list[int], a: int, swapped: bool = False) -> tuple[list[int], list[int]]:
    """Return the tokens and token types of a text that is cut after `a` tokens. The text is given without [CLS] and
    [SEP]."""
    first, second = (text[a:], text[:a]) if swapped else (text[:a], text[a:])
    return [CLS, *first, SEP, *second, SEP], [0] * (len(first) + 2) + [1] * (len(second) + 1)


def padded(written: list[list[int]]) -> dict[str, Tensor]:
    length = max(map(len, written))
    ids = torch.tensor([text + [0] * (length - len(text)) for text in written])
    mask = torch.tensor([[1] * len(text) + [0] * (length - len(text)) for text in written])
    return {"input_ids": ids, "attention_mask": mask}


texts = st.lists(st.lists(st.integers(10, 60), max_size=9), min_size=1, max_size=4)


@given(texts, st.lists(st.tuples(st.integers(0, 9), st.booleans()), min_size=4, max_size=4))
def test_a_text_is_cut_in_two_or_swapped_and_each_token_is_still_there_once(
    written: list[list[int]], ways: list[tuple[int, bool]]
) -> None:
    cuts = [min(cut, len(text)) for text, (cut, _) in zip(written, ways, strict=False)]
    made = halve(
        padded([[CLS, *text, SEP] for text in written]),
        torch.tensor([len(text) for text in written]),
        torch.tensor(cuts),
        torch.tensor([swapped for _, swapped in ways[: len(written)]]),
        max(map(len, written)) + 3,
        typed=True,
    )
    for i, text in enumerate(written):
        ids, types = in_halves(text, cuts[i], ways[i][1])
        assert tokens(made, i) == ids
        assert made["token_type_ids"][i].tolist()[: len(ids)] == types
    assert made["input_ids"].shape == made["token_type_ids"].shape
    assert (made["input_ids"][made["attention_mask"] == 0] == 0).all()


def read_by(method: Any) -> Any:
    """Record what the encoder of a method is given from now on, text by text, as (tokens, token types)."""
    given: list[tuple[list[int], list[int]]] = []
    forward = method.model.encoder.forward

    def noted(inputs: dict[str, Tensor], *rest: Any, **options: Any) -> Any:
        for i in range(len(inputs["input_ids"])):
            ids = tokens(inputs, i)
            given.append((ids, inputs["token_type_ids"][i].tolist()[: len(ids)]))
        return forward(inputs, *rest, **options)

    method.model.encoder.forward = noted
    return given


def words_of(method: Any, examples: Tensor) -> list[list[int]]:
    """Return the tokens of these texts as the stream has them, without [CLS] and [SEP]."""
    inputs = method.stream.batch(examples).inputs
    return [tokens(inputs, i)[1:-1] for i in range(len(examples))]


def test_prediction_the_features_that_are_held_and_the_choice_of_memory_read_texts_cut_in_the_middle(tiny: Any) -> None:
    method = at_task(tiny, "text", idbr())
    task = method.stream[1]
    ways = {
        "predict": lambda: method.predict(method.stream.batch(task.train)),
        "note": lambda: method.note(task),
        "choose": lambda: method.choose(task.train, task, 3),
    }
    for way, act in ways.items():
        given = read_by(method)
        act()
        read = method.held(task) if way == "note" else task.train
        wanted = [in_halves(text, len(text) // 2) for text in words_of(method, read)]
        assert sorted(given) == sorted(wanted), way


def test_a_text_as_long_as_the_encoder_allows_loses_its_last_token(tiny: Any) -> None:
    method = make(tiny, "text", idbr())[0]
    method.model.encoder.max_tokens = 6
    given = read_by(method)
    batch = Batch(padded([[CLS, 10, 11, 12, 13, SEP], [CLS, 10, SEP]]), *[torch.zeros(2, dtype=torch.int64)] * 3)
    method.model(batch)
    assert given == [in_halves([10, 11, 12], 1), in_halves([10], 0)]


def test_in_training_texts_are_cut_at_random_and_their_swapped_copies_at_another_place(tiny: Any) -> None:
    method = at_task(tiny, "text", idbr())
    batch = some(method, 10)
    (piece,) = method.expand(batch)
    given = read_by(method)
    method.loss(piece)
    written = words_of(method, batch.examples)
    cuts = []
    for i, (text, read) in enumerate(zip(written + written, given, strict=True)):
        found = [a for a in range(1, len(text)) if in_halves(text, a, swapped=i >= 10) == read]
        assert found, (text, read)
        cuts.append(found)
    assert any(not set(a) & set(b) for a, b in zip(cuts[:10], cuts[10:], strict=True))
    (again,) = method.expand(some(method, 10, step=1))
    assert not torch.equal(again.inputs["cut"], piece.inputs["cut"])


def test_every_cut_between_two_tokens_is_as_likely(tiny: Any) -> None:
    method = at_task(tiny, "text", idbr())
    batch = some(method, 1)
    (words,) = (batch.inputs["attention_mask"].sum(1) - 2).tolist()
    many = Batch(
        {key: value.repeat(600, 1) for key, value in batch.inputs.items()},
        batch.targets.repeat(600),
        batch.examples.repeat(600),
        batch.rows.repeat(600),
    )
    cut = method.halved(many, torch.Generator().manual_seed(0)).inputs["cut"]
    expected = 600 / (words - 1)
    for part in cut.split(600):
        counts = np.bincount(part.numpy(), minlength=words + 1)
        assert counts[0] == counts[words] == 0
        assert ((counts[1:-1] - expected) ** 2 / expected).sum() < 25  # chi-square, at most 8 degrees of freedom


def test_an_encoder_of_one_token_type_is_given_none(tiny: Any) -> None:
    method = at_task(tiny, "text", idbr())
    method.model.encoder.embeddings.token_type_embeddings = torch.nn.Embedding(1, 16)
    given: list[set[str]] = []
    forward = method.model.encoder.forward
    method.model.encoder.forward = lambda inputs, **options: given.append(set(inputs)) or forward(inputs, **options)
    method.loss(next(iter(method.expand(some(method)))))
    assert given == [{"input_ids", "attention_mask"}]


# -- the loss


def parts_of(method: Any, batch: Batch) -> tuple[Array, Array, Array]:
    """Compute g, s and the logits by hand, from the class tokens of the plain encoder."""
    inputs = batch.inputs
    halves = [
        in_halves(tokens(inputs, i)[1:-1], int(inputs["cut"][i]), bool(inputs["swapped"][i])) for i in range(len(batch))
    ]
    with torch.no_grad():
        made = {**padded([ids for ids, _ in halves]), "token_type_ids": padded([t for _, t in halves])["input_ids"]}
        h = array(method.model.encoder(made)[:, 0])
    both = np.tanh(linear(method.model.parts, h))
    head = method.model.head
    rows = np.concatenate([array(block) for block in head.blocks])
    unit = both / np.linalg.norm(both, axis=1, keepdims=True)
    logits = head.sigma.item() * unit @ (rows / np.linalg.norm(rows, axis=1, keepdims=True)).T
    return both[:, :6], both[:, 6:], logits


@pytest.mark.parametrize("replay", [False, True])
def test_loss_is_class_order_hold_and_in_rounds_of_replay_task(tiny: Any, replay: bool) -> None:
    """L = CE(y) + nsp CE(swapped; g) + c [reg_s MSE(s, s0) + reg_g MSE(g, g0)] + tsk CE(task; s), where c = 0.5 or
    5."""
    options = idbr(nsp=0.7, tsk=0.9, reg_g=0.6, reg_s=0.3)
    method = at_task(tiny, "text", options, **{"train.batch_size": 6})
    before = {i: array(row) for i, row in zip(method.noted.tolist(), method.before, strict=True)}
    take_step(method, next(iter(method.expand(some(method)))))
    pieces = list(method.expand(some(method, 6, step=9 if replay else 8)))
    assert len(pieces) == (2 if replay else 1)
    for piece in pieces:
        with recorded_passes() as passes:
            terms = method.loss(piece)
        assert [(p.model, p.training) for p in passes] == [(method.model, True)]
        g, s, logits = parts_of(method, piece)
        n = len(piece) // 2
        assert n == 6
        assert torch.equal(piece.examples[:n], piece.examples[n:])
        targets, old = piece.targets.numpy(), np.stack([before[i] for i in piece.examples[:n].tolist()])
        held = 0.3 * ((s[:n] - old[:, 6:]) ** 2).mean() + 0.6 * ((g[:n] - old[:, :6]) ** 2).mean()
        wanted = {
            "class": cross_entropy(logits, targets),
            "order": 0.7 * cross_entropy(linear(method.model.order, g), np.arange(2 * n) // n),
            "hold": (5.0 if replay else 0.5) * held,
        }
        if replay:
            wanted["task"] = 0.9 * cross_entropy(linear(method.model.tasks, s), (targets >= 2).astype(int))
        assert {name: term.item() for name, term in terms.items()} == pytest.approx(wanted, rel=1e-4)
        assert held > 1e-4


def test_in_the_first_task_nothing_is_held_or_replayed(tiny: Any) -> None:
    method = at_task(tiny, "text", idbr(every=1), task=0)
    (piece,) = method.expand(some(method))
    assert set(method.loss(piece)) == {"class", "order"}
    assert len(method.before) == 0


def test_features_are_held_at_those_before_the_task_under_the_network_of_then(tiny: Any) -> None:
    method, stream, config = make(tiny, "text", idbr())
    trainer = Trainer(method, stream, config)
    trainer.learn(stream[0])
    assert len(method.before) == 0
    last = weights(method.model)
    seen: list[Tensor] = []
    after = method.after_epoch

    def after_epoch(stage: Any) -> None:
        seen.append(method.before.clone())
        after(stage)

    method.after_epoch = after_epoch  # type: ignore[method-assign]
    trainer.learn(stream[1])
    assert len(method.before) == 0  # not in later checkpoints
    assert torch.equal(seen[0], seen[-1])
    held = sorted({*stream[1].train.tolist(), *method.noted.tolist()})
    assert method.noted.tolist() == held
    assert len(held) == 20 + 10  # the task's texts and the memory's
    method.model.load_state_dict({**method.model.state_dict(), **last})
    with stream.licence("test", torch.tensor(held)):
        wanted = method.outputs(torch.tensor(held)).features
    assert torch.allclose(seen[0], wanted, atol=1e-6)


def test_nothing_is_held_back_before_the_first_update_but_what_the_cut_changes(tiny: Any) -> None:
    """If texts are cut in the middle, as when their features were recorded, the term is 0 until the first update."""
    method = at_task(tiny, "text", idbr())
    (piece,) = method.expand(some(method))
    assert method.loss(piece)["hold"].item() > 1e-6
    middle = (piece.inputs["attention_mask"].sum(1) - 2) // 2
    piece = dataclasses.replace(piece, inputs={**piece.inputs, "cut": middle})
    assert method.loss(piece)["hold"].item() < 1e-10
    take_step(method, piece)
    assert method.loss(piece)["hold"].item() > 1e-6


def test_each_part_is_taught_by_its_own_auxiliary_task(tiny: Any) -> None:
    """`order` moves only the rows of g, and `task` only those of s."""
    method = at_task(tiny, "text", idbr())
    piece = next(iter(method.expand(some(method, step=9))))
    for term, mine in (("order", slice(0, 6)), ("task", slice(6, 12))):
        method.model.zero_grad()
        method.loss(piece)[term].backward()
        moved = method.model.parts.head.blocks[0].grad.abs().sum(1) > 0
        assert moved[mine].all()
        assert int(moved.sum()) == 6


@pytest.mark.parametrize(
    ("off", "left"),
    [
        ({"nsp": 0.0}, {"class", "hold", "task"}),
        ({"tsk": 0.0}, {"class", "order", "hold"}),
        ({"reg_g": 0.0, "reg_s": 0.0}, {"class", "order", "task"}),
        ({"reg_replay": 0.0}, {"class", "order", "task"}),
        ({"every": 0}, {"class", "order", "hold"}),
    ],
)
def test_a_weight_of_zero_leaves_its_term_out_and_what_only_it_needs(
    tiny: Any, off: dict[str, Any], left: set[str]
) -> None:
    method = at_task(tiny, "text", idbr(**off))
    pieces = list(method.expand(some(method, step=9)))
    assert set(method.loss(pieces[0])) == left
    assert len(pieces) == (1 if "every" in off else 2)
    if "nsp" in off:
        assert len(pieces[0]) == 8  # no swapped copies
    if "reg_g" in off:
        assert len(method.before) == 0


# -- rounds of replay


def test_a_round_has_a_batch_of_each_task_shuffled_together_and_takes_the_place_of_every_nth_step(tiny: Any) -> None:
    settings = {"benchmark.tasks": [2, 1, 2], "train.epochs": 3, "train.batch_size": 3, "memory.size": 12}
    method, stream, config = make(tiny, "text", idbr(every=4), **settings)
    steps: list[tuple[int, int, list[int]]] = []  # task, step of the task, classes
    loss = method.loss

    def noted(batch: Batch) -> Any:
        now = method.now
        terms = loss(batch)
        steps.append((now.task, now.epoch * now.steps + now.step + 1, batch.targets[: len(batch) // 2].tolist()))
        assert ("task" in terms) == (now.task > 0 and steps[-1][1] % 4 == 0)
        if now.task:  # replayed texts are in memory or belong to the task
            allowed = {*method.memory.examples.tolist(), *stream[now.task].train.tolist()}
            assert set(batch.examples.tolist()) <= allowed
        return terms

    method.loss = noted  # type: ignore[method-assign]
    Trainer(method, stream, config).run()
    mixed = set()
    for task in range(3):
        own = [(step, classes) for t, step, classes in steps if t == task]
        count = 3 * -(-len(stream[task].train) // 3)
        assert sorted({step for step, _ in own}) == list(range(1, count + 1))
        for step in range(1, count + 1):
            pieces = [classes for s, classes in own if s == step]
            assert len(pieces) == (task + 1 if step % 4 == 0 and task else 1)
            if task and step % 4 == 0:
                found = np.searchsorted([2, 3, 5], np.concatenate(pieces), side="right")
                assert np.bincount(found, minlength=task + 1)[:task].tolist() == [3] * task
                mixed |= {len(set(np.searchsorted([2, 3, 5], piece, side="right").tolist())) for piece in pieces}
            else:
                assert all(c in stream[task].classes for c in pieces[0])
    assert max(mixed) > 1  # shuffled


def test_an_old_task_that_has_no_slot_in_memory_is_passed_over(tiny: Any) -> None:
    method = at_task(tiny, "text", idbr(), task=2, **{"benchmark.tasks": [2, 1, 2]})
    method.memory.keep(torch.nonzero(method.memory.task == 1).flatten())
    pieces = list(method.expand(some(method, 8, step=9)))
    assert len(pieces) == 2
    assert {int(c) for piece in pieces for c in piece.targets} <= {2, 3, 4}
    assert all(method.loss(piece)["task"].isfinite() for piece in pieces)


# -- the learning rate


def test_the_learning_rate_rises_for_at_most_a_tenth_of_the_task(tiny: Any) -> None:
    method = make(tiny, "text", idbr(warmup=4))[0]
    method.now.steps, method.now.epochs = 20, 2  # a tenth of the steps is 4
    assert [method.warm(step / 20) for step in range(6)] == pytest.approx([0.25, 0.5, 0.75, 1, 1, 1])
    method.now.epochs = 1
    assert [method.warm(step / 20) for step in range(3)] == pytest.approx([0.5, 1, 1])
    method.now.steps = 5  # too few steps for a warm-up
    assert method.warm(0.0) == 1
    assert make(tiny, "text", idbr(warmup=0))[0].stages(method.stream[0])[0].schedule is None


def test_all_that_is_not_the_encoder_learns_at_the_heads_rate(tiny: Any) -> None:
    method, stream, config = make(tiny, "text", idbr(), **{"train.head_lr": 0.5})
    trainer = Trainer(method, stream, config)
    trainer.learn(stream[0])
    assert trainer.optimiser is not None
    rates = {id(p): group["lr"] for group in trainer.optimiser.param_groups for p in group["params"]}
    names = {name: rates[id(p)] for name, p in method.model.named_parameters()}
    assert all(rate == (0.05 if name.startswith("encoder.") else 0.5) for name, rate in names.items())
    assert {name.partition(".")[0] for name in names} == {"encoder", "head", "parts", "order", "tasks"}


# -- memory


def test_memory_keeps_distinct_texts_nearest_to_the_centres_of_clusters_of_class_tokens(tiny: Any) -> None:
    method, stream, config = make(tiny, "text", idbr(), **{"memory.size": 8})
    Trainer(method, stream, config).learn(stream[0])
    kept = method.memory.examples
    assert len(set(kept.tolist())) == 8
    bare = Halves(method.model.encoder, torch.nn.Identity(), torch.float32).eval()  # type: ignore[arg-type]
    for c in (0, 1):
        members = stream[0].train[stream.targets[stream[0].train] == c]
        with torch.no_grad():
            h = bare(stream.batch(members)).features
        rng = generator(0, "k-means", 0, c)
        assert kept[method.memory.group == c].tolist() == members[central(h, 4, rng)].tolist()


def test_of_well_separated_clusters_each_gives_the_text_at_its_middle_the_largest_first() -> None:
    rng = np.random.default_rng(0)
    places = np.array([[0.0, 0.0], [50.0, 0.0], [0.0, 50.0]])
    points = np.concatenate([place + rng.normal(size=(n, 2)) for place, n in zip(places, (5, 20, 11), strict=True)])
    owner = np.repeat([0, 1, 2], [5, 20, 11])
    means = np.stack([points[owner == k].mean(0) for k in (1, 2, 0)])
    wanted, _ = pairwise_distances_argmin_min(means, points)
    found = central(torch.from_numpy(points), 3, torch.Generator().manual_seed(0))
    assert found.tolist() == wanted.tolist()


def test_equal_texts_are_never_chosen_twice() -> None:
    points = torch.tensor([[0.0], [0.0], [0.0], [1.0]])
    assert sorted(central(points, 4, torch.Generator().manual_seed(0)).tolist()) == [0, 1, 2, 3]
    assert len(set(central(points, 3, torch.Generator().manual_seed(1)).tolist())) == 3
    assert len(central(points, 9, torch.Generator().manual_seed(2))) == 4


def test_memory_can_be_chosen_at_random(tiny: Any) -> None:
    found = []
    for name in (idbr(), {"name": "er"}):
        method, stream, config = make(tiny, "text", name, **{"memory.select": "random"})
        Trainer(method, stream, config).learn(stream[0])
        found.append(method.memory.examples.tolist())
    assert found[0] == found[1]


# -- whole runs


def test_with_rounds_of_replay_resume_is_exact(tiny: Any, tmp_path: Path) -> None:
    method: Any = idbr(every=2, warmup=5)
    counted_run(tiny, method, "text", tmp_path)
    check_resume_equals_the_straight_run(tiny, method, "text", tmp_path)


@pytest.mark.parametrize("wrong", [{"hidden": 0}, {"reg_g": -1.0}, {"every": -1}, {"tsk": -0.5}])
def test_values_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(wrong))}.*{next(iter(wrong.values()))}"):
        IDBR(**wrong)


def test_other_data_than_texts_are_refused(tiny: Any) -> None:
    with pytest.raises(ConfigError, match=r"IDBR is not defined for token data.*need whole texts"):
        make(tiny, "token", idbr())
