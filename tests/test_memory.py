"""The memory: budgets, herding, reservoir, ring and balanced sampling, notes, and its state."""

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bace.config.parse import config_from
from bace.core.memory import Memory, draw_balanced, herd, stack_rows, unstack_rows
from bace.core.trainer import Trainer
from bace.errors import ConfigError
from bace.experiments.assemble import assemble
from bace.randomness import generator

RNG = generator(0, "test")


def ids(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def groups_of(memory: Memory) -> dict[int, list[int]]:
    return {g: memory.examples[memory.group == g].tolist() for g in sorted(set(memory.group.tolist()))}


# -- budgets (docs/bace.md 1.8)


@pytest.mark.parametrize(
    ("budget", "tasks", "classes", "quotas"),
    [
        ({"size": 100}, 10, 10, [10, 5, 3, 2, 2, 1, 1, 1, 1, 1]),
        ({"size": 100}, 20, 5, [20, 10, 6, 5, 4, 3, 2, 2, 2, 2, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1]),
        ({"size": 500}, 10, 10, [50, 25, 16, 12, 10, 8, 7, 6, 5, 5]),
        ({"size": 500}, 20, 5, [100, 50, 33, 25, 20, 16, 14, 12, 11, 10, 9, 8, 7, 7, 6, 6, 5, 5, 5, 5]),
        ({"per_class": 5}, 10, 10, [5] * 10),
        ({"per_class": 20}, 20, 5, [20] * 20),
    ],
)
def test_sizes_after_each_task(budget, tasks, classes, quotas):
    """Every class has q = floor(budget / classes so far) examples, other slots stay empty; per class never shrinks."""
    memory = Memory(**budget)
    per_class = 150
    first_order: dict[int, list[int]] = {}
    for t in range(tasks):
        known = (t + 1) * classes
        quota = memory.quota(known)
        assert quota == quotas[t]
        new = {c: torch.arange(per_class) + per_class * c for c in range(t * classes, known)}
        memory.fill(new, t, quota, RNG)
        kept = groups_of(memory)
        assert sorted(kept) == list(range(known))
        assert {len(examples) for examples in kept.values()} == {quota}
        assert len(memory) == quota * known
        if "size" in budget:
            assert len(memory) <= budget["size"]
        for c, examples in kept.items():  # they are a prefix of the order in which they were chosen
            first_order.setdefault(c, examples)
            assert examples == first_order[c][:quota]
        assert memory.task.tolist() == [g // classes for g in memory.group.tolist()]


def test_a_class_smaller_than_its_quota_gives_all_it_has_and_takes_nobody_elses_place():
    memory = Memory(size=12)
    memory.fill({0: ids(1, 2), 1: torch.arange(10, 30)}, 0, memory.quota(2), RNG)
    assert groups_of(memory) == {0: [1, 2], 1: [10, 11, 12, 13, 14, 15]}
    memory.fill({2: torch.arange(50, 60)}, 1, memory.quota(3), RNG)
    assert groups_of(memory) == {0: [1, 2], 1: [10, 11, 12, 13], 2: [50, 51, 52, 53]}


def test_too_small_a_memory_is_an_error_that_says_what_to_do():
    memory = Memory(size=9)
    assert memory.quota(9) == 1
    with pytest.raises(ConfigError, match=r"9 examples cannot hold one of each of 10 classes.*at least 10") as error:
        memory.quota(10)
    assert "memory.allow_missing_classes" in str(error.value)


def test_too_small_a_memory_is_refused_before_training(tiny):
    with pytest.raises(ConfigError, match="4 examples cannot hold one of each of 5 classes"):
        assemble(config_from(tiny.settings("image", method="ER", memory=4)))


def test_with_missing_classes_allowed_one_example_of_a_random_subset_is_kept():
    kept: Counter[int] = Counter()
    for seed in range(300):
        memory = Memory(size=4, allow_missing_classes=True)
        memory.fill({c: ids(10 * c, 10 * c + 1) for c in range(3)}, 0, memory.quota(3), generator(seed))
        assert len(memory) == 3
        memory.fill({c: ids(10 * c, 10 * c + 1) for c in range(3, 6)}, 1, memory.quota(6), generator(seed, 1))
        assert len(memory) == 4
        assert len(set(memory.group.tolist())) == 4  # one example of each
        assert memory.examples.tolist() == [10 * g for g in memory.group.tolist()]  # the preferred example
        kept.update(memory.group.tolist())
    assert all(abs(kept[c] - 200) < 5 * math.sqrt(300 * 2 / 9) for c in range(6))  # 4 of 6, 5 sigma


@pytest.mark.parametrize("budget", [{"size": 5, "per_class": 1}, {"size": -1}, {"per_class": -2}])
def test_a_contradictory_budget_is_refused(budget):
    with pytest.raises(ConfigError, match="memory: give a total"):
        Memory(**budget)


# -- herding


def greedy_herding(features: np.ndarray, count: int) -> list[int]:
    """Follow the definition by brute force: try every free item and take the mean of the whole chosen set."""
    unit = features / np.linalg.norm(features, axis=1, keepdims=True)
    target = unit.mean(axis=0)
    chosen: list[int] = []
    while len(chosen) < min(count, len(unit)):
        free = [i for i in range(len(unit)) if i not in chosen]
        distance = [np.linalg.norm(target - unit[[*chosen, i]].mean(axis=0)) for i in free]
        chosen.append(free[int(np.argmin(distance))])
    return chosen


@given(st.integers(1, 12), st.integers(2, 5), st.integers(0, 20), st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_every_herded_pick_is_the_best_of_those_left(examples, width, count, seed):
    """Each choice is as good as the greedy loop's; two may be equally good (of two examples, both are at first)."""
    features = np.random.default_rng(seed).normal(size=(examples, width))
    order = herd(torch.from_numpy(features), count).tolist()
    assert len(order) == len(set(order)) == min(count, examples)
    unit = features / np.linalg.norm(features, axis=1, keepdims=True)
    for k in range(len(order)):
        chosen = order[:k]
        distance = {
            i: np.linalg.norm(unit.mean(axis=0) - unit[[*chosen, i]].mean(axis=0))
            for i in range(examples)
            if i not in chosen
        }
        assert distance[order[k]] <= min(distance.values()) + 1e-12


@pytest.mark.parametrize(("examples", "width", "count"), [(40, 16, 25), (60, 3, 60), (13, 8, 20)])
def test_herding_equals_the_brute_force_greedy_loop(examples, width, count):
    features = np.random.default_rng(examples).normal(size=(examples, width)) + 1
    order = herd(torch.from_numpy(features), count).tolist()
    last = min(count, examples) - (count >= examples)  # the last two are a tie, or forced
    assert order[: last - 1] == greedy_herding(features, count)[: last - 1]


def test_herding_by_hand():
    """The directions are (1, 0), (0, 1), (3/5, 4/5), and their mean is (8/15, 9/15). The third is nearest to it. With
    it, the first gives the mean (4/5, 2/5), 1/3 away, and the second gives (3/10, 9/10), 0.38 away."""
    features = torch.tensor([[2.0, 0.0], [0.0, 0.1], [6.0, 8.0]])  # lengths differ, but only directions count
    assert herd(features, 3).tolist() == [2, 0, 1]


def test_herding_a_shorter_list_gives_its_prefix_and_never_picks_twice():
    features = torch.randn(30, 6, generator=generator("herd"), dtype=torch.float64)
    whole = herd(features, 99).tolist()
    assert sorted(whole) == list(range(30))
    for count in (0, 1, 7, 29):
        assert herd(features, count).tolist() == whole[:count]


def test_herding_picks_the_first_of_equal_features_and_each_once():
    assert herd(torch.ones(5, 3), 5).tolist() == [0, 1, 2, 3, 4]
    assert herd(torch.eye(2)[[0, 1, 0, 1]], 4).tolist() == [0, 1, 2, 3]


@pytest.fixture(scope="module")
def learned(tiny: Any) -> Any:
    config = config_from(tiny.settings("image", method="ER", memory=11, **{"train.epochs": 1}))
    method, stream = assemble(config)
    orders: dict[int, list[int]] = {}
    original = method.after_task

    def after_task(task: Any) -> None:
        """Keep an order made from clean features by brute force, before the memory is filled."""
        for c in task.classes:
            own = task.train[stream.targets[task.train] == c]
            with torch.inference_mode():
                features = method.model(stream.batch(own)).features
            orders[c] = [int(own[i]) for i in greedy_herding(features.double().numpy(), 10)]
        original(task)

    method.after_task = after_task  # type: ignore[method-assign]
    Trainer(method, stream, config).run()
    return method, stream, orders


def test_a_run_keeps_the_herded_examples_of_each_class_on_clean_features(learned):
    """11 slots for 5 classes hold the first 2 of each class in the order of its own task, and one slot is empty."""
    method, _, orders = learned
    assert groups_of(method.memory) == {c: order[:2] for c, order in orders.items()}


def test_random_selection_differs_from_herding_and_stays_within_the_class(tiny):
    config = config_from(
        tiny.settings("image", method="ER", **{"memory.size": 11, "memory.select": "random", "train.epochs": 1})
    )
    method, stream = assemble(config)
    Trainer(method, stream, config).run()
    kept = groups_of(method.memory)
    assert {c: len(examples) for c, examples in kept.items()} == dict.fromkeys(range(5), 2)
    for c, examples in kept.items():
        assert stream.targets[examples].tolist() == [c, c]
        assert set(examples) <= set(next(t for t in stream if c in t.classes).train.tolist())


# -- sentences


def test_token_quotas_count_entity_types_and_sentences_are_kept_whole_and_once(tiny):
    config = config_from(tiny.settings("token", method="ER", memory=13, **{"train.epochs": 1}))
    method, stream = assemble(config)
    sizes = []
    for t, types in ((0, 2), (1, 3), (2, 5)):
        task = stream[t]
        method.now.task = t
        stream.begin(task, method.remembered())
        assert method.quota(task) == 13 // types
        method.remember(task)
        kept = groups_of(method.memory)
        sizes.append({g: len(examples) for g, examples in kept.items()})
        assert len(set(method.memory.examples.tolist())) == len(method.memory)  # no sentence twice
        for group, examples in kept.items():
            for example in examples:
                first, last = stream.data.row_start[example], stream.data.row_start[example + 1]
                shown = {stream.names[c] for c in stream.targets[first:last].tolist()}
                kind = stream.names[1 + 2 * group][2:]
                assert shown & {f"B-{kind}", f"I-{kind}"}
    assert sizes == [{0: 6, 1: 6}, {0: 4, 1: 4, 2: 4}, {0: 2, 1: 2, 2: 2, 3: 2, 4: 2}]


# -- reservoir


def reservoir_inclusions(size: int, offers: int, runs: int, chunk: int) -> np.ndarray:
    kept = np.zeros(offers)
    for run in range(runs):
        memory = Memory(size=size)
        rng = generator("reservoir", chunk, run)
        for part in torch.arange(offers).split(chunk):
            memory.offer_reservoir(part, 0, torch.zeros_like(part), rng)
        assert len(memory) == min(size, offers)
        assert int(memory.seen) == offers
        kept[memory.examples.numpy()] += 1
    return kept / runs


@pytest.mark.parametrize("chunk", [1, 7, 40])
def test_reservoir_keeps_every_offer_with_probability_size_over_offers(chunk):
    """Monte Carlo over 40 offers, one by one and in batches, within 4.5 standard errors."""
    size, offers, runs = 8, 40, 300
    frequency = reservoir_inclusions(size, offers, runs, chunk)
    p = size / offers
    assert frequency.mean() == pytest.approx(p)
    assert np.abs(frequency - p).max() < 4.5 * math.sqrt(p * (1 - p) / runs)


@given(st.integers(1, 6), st.integers(1, 25), st.integers(1, 25), st.integers(0, 10**6))
@settings(max_examples=40, deadline=None)
def test_a_batch_of_offers_ends_as_the_same_offers_one_at_a_time(size, offers, chunk, seed):
    """With the same random numbers, every slot equals Vitter's rule in plain Python, not only in distribution."""
    chances = torch.rand(offers, generator=generator(seed), dtype=torch.float64).tolist()
    plain: list[int] = []
    for i, chance in enumerate(chances):
        slot = i if i < size else int(chance * (i + 1))
        if i < size:
            plain.append(i)
        elif slot < size:
            plain[slot] = i
    memory, rng = Memory(size=size), generator(seed)
    for part in torch.arange(offers).split(chunk):
        memory.offer_reservoir(part, 0, part % 3, rng, score=part.double())
    assert memory.examples.tolist() == plain
    assert memory.group.tolist() == [i % 3 for i in plain]
    assert memory.score.tolist() == [float(i) for i in plain]


@pytest.mark.parametrize("chunk", [1, 7, 60])
def test_offers_to_slots_of_forgotten_examples_fill_them_again(chunk):
    """Learner.forget leaves a memory that is shorter than its size, though more were offered than it can hold."""
    size, offered, later = 6, 20, 60
    memory, rng = Memory(size=size), generator("forgotten")
    memory.offer_reservoir(torch.arange(offered), 0, torch.zeros(offered, dtype=torch.int64), rng)
    memory.keep(ids(0, 3))
    plain: list[int] = memory.examples.tolist()
    chances = torch.rand(later, generator=generator("later"), dtype=torch.float64).tolist()
    for i, chance in enumerate(chances, offered):
        slot = int(chance * (i + 1))
        if slot < len(plain):
            plain[slot] = i
        elif slot < size:
            plain.append(i)
    rng = generator("later")
    for part in torch.arange(offered, offered + later).split(chunk):
        memory.offer_reservoir(part, 1, part % 3, rng)
    assert memory.examples.tolist() == plain
    assert 2 < len(plain) <= size


def test_a_reservoir_may_hold_an_example_twice_with_other_notes():
    memory = Memory(size=4)
    memory.offer_reservoir(ids(7, 8), 0, ids(0, 0), RNG, logits=torch.tensor([[1.0], [2.0]]))
    memory.offer_reservoir(ids(7), 1, ids(0), RNG, logits=torch.tensor([[3.0, 4.0]]))
    assert memory.examples.tolist() == [7, 8, 7]
    assert memory.task.tolist() == [0, 0, 1]
    assert memory.logits[2].tolist() == [3.0, 4.0]
    assert memory.logits[0, 0] == 1.0


def test_the_notes_of_a_full_reservoir_are_replaced_where_they_are():
    """The logits of 20,000 examples are 80 MB: a step that replaces a few must not copy them."""
    memory, rng = Memory(size=4), generator("in place")
    memory.offer_reservoir(ids(0, 1, 2, 3), 0, ids(0, 0, 0, 0), rng, logits=torch.zeros(4, 2))
    place = memory.logits.data_ptr()
    for i in range(4, 40):
        memory.offer_reservoir(ids(i), 0, ids(0), rng, logits=torch.full((1, 2), float(i)))
    assert memory.logits.data_ptr() == place
    assert max(memory.examples.tolist()) > 3
    expected = [[0.0 if i < 4 else float(i)] * 2 for i in memory.examples.tolist()]
    assert memory.logits.tolist() == expected
    for i in range(40, 400):  # logits of a shorter sentence
        memory.offer_reservoir(ids(i), 0, ids(0), rng, logits=torch.full((1, 1), float(i)))
    assert memory.logits.data_ptr() == place
    late = memory.examples >= 40
    assert late.any()
    assert memory.logits[late, 0].tolist() == memory.examples[late].tolist()
    assert memory.logits[late, 1].isnan().all()


# -- ring and balanced


def test_a_ring_keeps_the_newest_of_each_group_first_in_first_out():
    memory = Memory(size=6)
    memory.offer_ring(ids(1, 2, 3), 0, ids(0, 1, 0), quota=2)
    memory.offer_ring(ids(4, 5, 6, 7), 1, ids(0, 0, 1, 2), quota=2)
    assert groups_of(memory) == {0: [4, 5], 1: [2, 6], 2: [7]}
    assert {int(e): int(t) for e, t in zip(memory.examples, memory.task, strict=True)} == {4: 1, 5: 1, 2: 0, 6: 1, 7: 1}
    memory.offer_ring(ids(8), 2, ids(2), quota=0)
    assert len(memory) == 0


@given(
    st.integers(1, 20),
    st.lists(st.integers(0, 4), min_size=1, max_size=60),
    st.integers(1, 10),
    st.integers(0, 1000),
)
@settings(max_examples=60, deadline=None)
def test_greedy_balancing_follows_its_rule_at_every_offer(size, groups, chunk, seed):
    """Every example follows the rule of the paper: it is taken below the quota of the classes seen, the memory never
    overflows, and a removed example comes from a largest group."""
    memory, rng = Memory(size=size), generator(seed)
    for i, group in enumerate(groups):
        before = groups_of(memory)
        count = {g: len(examples) for g, examples in before.items()}
        memory.offer_greedy(ids(i), 0, ids(group), rng)
        after = groups_of(memory)
        assert len(memory) <= size
        quota = max(size // len(set(count) | {group}), 1)
        if count.get(group, 0) >= quota:
            assert after == before
            continue
        assert after[group][-1] == i
        gone = {e for examples in before.values() for e in examples} - {
            e for examples in after.values() for e in examples
        }
        if sum(count.values()) < size:
            assert not gone
        else:
            (left,) = gone
            owner = next(g for g, examples in before.items() if left in examples)
            assert count[owner] == max(count.values())


@pytest.mark.parametrize(("size", "classes"), [(20, 4), (23, 5), (7, 7), (100, 10)])
def test_balanced_counts_differ_by_at_most_one_once_every_class_was_offered_its_quota(size, classes):
    memory, rng = Memory(size=size), generator("greedy", size)
    for c in range(classes):  # one class after another, the hardest order
        offered = torch.arange(size) + 1000 * c
        memory.offer_greedy(offered, c, torch.full_like(offered, c), rng)
        counts = Counter(memory.group.tolist())
        assert len(counts) == c + 1
        assert max(counts.values()) - min(counts.values()) <= 1
        assert len(memory) <= size


def test_balancing_with_a_number_per_class_takes_that_many_of_each_and_lets_none_go():
    memory = Memory(per_class=2)
    memory.offer_greedy(ids(1, 2, 3, 4, 5), 0, ids(0, 0, 0, 1, 1), RNG)
    memory.offer_greedy(ids(6, 7, 8), 1, ids(2, 1, 2), RNG)
    assert groups_of(memory) == {0: [1, 2], 1: [4, 5], 2: [6, 8]}


# -- notes


def test_a_note_not_given_with_its_slot_is_nan_until_it_is():
    memory = Memory(size=3)
    memory.note("keys", torch.zeros(0, 2))
    memory.fill({0: ids(4, 5), 1: ids(6)}, 0, 2, generator("x"))
    assert memory.get_buffer("keys").isnan().all()
    memory.get_buffer("keys")[:] = torch.tensor([[4.0, 0], [5, 0], [6, 0]])
    memory.fill({2: ids(7, 8)}, 1, 1, generator("x"))
    assert memory.examples.tolist() == [4, 6, 7]
    expected = torch.tensor([[4.0, 0], [6, 0], [math.nan, math.nan]])
    torch.testing.assert_close(memory.get_buffer("keys"), expected, equal_nan=True)


def test_notes_of_growing_width_are_padded_with_nan_and_follow_their_slots():
    memory = Memory(size=10)
    memory.add(ids(1, 2), 0, ids(0, 0), logits=torch.tensor([[1.0, 2.0], [3.0, 4.0]]), weight=torch.tensor([0.1, 0.2]))
    memory.add(ids(3), 1, ids(1), logits=torch.tensor([[5.0, 6.0, 7.0]]), weight=torch.tensor([0.3]))
    nan = math.nan
    same = {"equal_nan": True, "rtol": 0, "atol": 0}
    torch.testing.assert_close(memory.logits, torch.tensor([[1.0, 2, nan], [3, 4, nan], [5, 6, 7]]), **same)

    memory.keep(ids(2, 0))
    torch.testing.assert_close(memory.logits, torch.tensor([[5.0, 6, 7], [1, 2, nan]]), **same)
    assert memory.examples.tolist() == [3, 1]

    memory.put(ids(1), ids(9), 2, ids(1), logits=torch.tensor([[1.0, 1, 1, 1]]), weight=torch.tensor([0.9]))
    torch.testing.assert_close(memory.logits, torch.tensor([[5.0, 6, 7, nan], [1, 1, 1, 1]]), **same)
    assert memory.task.tolist() == [1, 2]

    memory.put(ids(0), ids(4), 3, ids(1), logits=torch.tensor([[8.0]]), weight=torch.tensor([0.4]))  # a narrower note
    torch.testing.assert_close(memory.logits, torch.tensor([[8.0, nan, nan, nan], [1, 1, 1, 1]]), **same)
    torch.testing.assert_close(memory.weight, torch.tensor([0.4, 0.9]))

    memory.trim(1)
    assert memory.examples.tolist() == [4]
    torch.testing.assert_close(memory.logits, torch.tensor([[8.0, nan, nan, nan]]), **same)
    torch.testing.assert_close(memory.weight, torch.tensor([0.4]))


@given(st.lists(st.tuples(st.sampled_from(["add", "keep", "put", "trim"]), st.integers(1, 4)), max_size=15))
@settings(max_examples=60, deadline=None)
def test_every_slot_keeps_its_own_note_whatever_is_done(actions):
    """The note of example e is e + 0.5 in its first column and as wide as it was stored."""
    memory, fresh = Memory(size=99), iter(range(1000))
    width_of: dict[int, int] = {}

    def new(count: int, width: int) -> tuple[Tensor, Tensor]:
        examples = torch.tensor([next(fresh) for _ in range(count)])
        width_of.update(dict.fromkeys(examples.tolist(), width))
        return examples, (examples + 0.5)[:, None].expand(count, width).float()

    for turn, (action, number) in enumerate([("add", 2), *actions]):
        if action == "add":
            examples, notes = new(number, turn % 4 + 1)
            memory.add(examples, turn, examples % 3, note_a=notes)
        elif action == "keep":
            memory.keep(torch.randperm(len(memory), generator=generator(turn))[:number])
        elif action == "trim":
            memory.trim(number)
        elif len(memory):
            slot = torch.tensor([number % len(memory)])
            examples, notes = new(1, turn % 4 + 1)
            memory.put(slot, examples, turn, examples % 3, note_a=notes)
        assert len(memory.examples) == len(memory.task) == len(memory.group) == len(memory.note_a)
        for example, note in zip(memory.examples.tolist(), memory.note_a, strict=True):
            width = width_of[example]
            assert note[:width].tolist() == [example + 0.5] * width
            assert note[width:].isnan().all()


def test_notes_of_several_rows_are_padded_in_rows_and_columns():
    """A sentence of two words and three classes, then one of one word and four classes, then a longer one."""
    memory, nan = Memory(size=10), math.nan
    memory.note("logits", torch.zeros(0, 0, 0))
    same = {"equal_nan": True, "rtol": 0, "atol": 0}
    memory.add(ids(1), 0, ids(0), logits=torch.tensor([[[1.0, 2, 3], [4, 5, 6]]]))
    memory.add(ids(2), 1, ids(1), logits=torch.tensor([[[7.0, 8, 9, 10]]]))
    one, two = [[1, 2, 3, nan], [4, 5, 6, nan]], [[7, 8, 9, 10], [nan] * 4]
    torch.testing.assert_close(memory.logits, torch.tensor([one, two]), **same)
    memory.put(ids(0), ids(3), 1, ids(1), logits=torch.tensor([[[1.0], [2], [3]]]))  # more rows, fewer columns
    longer = [[1, nan, nan, nan], [2, nan, nan, nan], [3, nan, nan, nan]]
    torch.testing.assert_close(memory.logits, torch.tensor([longer, [*two, [nan] * 4]]), **same)
    memory.keep(ids(1))
    torch.testing.assert_close(memory.logits, torch.tensor([[*two, [nan] * 4]]), **same)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=6), st.integers(1, 3), st.data())
@settings(max_examples=40, deadline=None)
def test_stacked_rows_come_back_for_any_draw_of_examples(lengths, width, data):
    """The oracle is a plain list of each example's rows; a draw may name an example twice."""
    values = torch.arange(float(sum(lengths) * width)).reshape(-1, width)
    owner = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    own = values.split(lengths)
    stacked = stack_rows(values, owner, len(lengths))
    assert stacked.shape == (len(lengths), max(lengths), width)
    for rows, note in zip(own, stacked, strict=True):
        assert torch.equal(note[: len(rows)], rows)
        assert note[len(rows) :].isnan().all()
    drawn = data.draw(st.lists(st.integers(0, len(lengths) - 1), min_size=1, max_size=8))
    again = torch.repeat_interleave(torch.arange(len(drawn)), torch.tensor([lengths[i] for i in drawn]))
    assert torch.equal(unstack_rows(stacked[drawn], again), torch.cat([own[i] for i in drawn]))


def test_the_reservoir_keeps_the_notes_of_several_rows_with_their_example():
    """The note of example e has 1 + e % 3 rows of e, as wide as the batch it came with."""
    memory = Memory(size=6)
    memory.note("logits", torch.zeros(0, 0, 0))
    for turn, part in enumerate(torch.arange(60).split(7)):
        rows = 1 + part % 3
        owner = torch.repeat_interleave(torch.arange(len(part)), rows)
        notes = stack_rows(part[owner].double()[:, None].expand(-1, 2 + turn), owner, len(part))
        memory.offer_reservoir(part, turn, part % 2, generator("rows", turn), logits=notes)
    assert len(set(memory.task.tolist())) > 1
    for example, turn, note in zip(memory.examples.tolist(), memory.task.tolist(), memory.logits, strict=True):
        assert (~note.isnan()).sum() == (1 + example % 3) * (2 + turn)
        assert (note[: 1 + example % 3, : 2 + turn] == example).all()


# -- state


def test_the_state_of_a_filled_memory_loads_into_an_empty_one():
    memory, other = Memory(size=5), Memory(size=5)
    other.note("logits", torch.zeros(0, 0))  # a method declares its notes when it is built
    rng = generator("state")
    memory.offer_reservoir(torch.arange(20), 3, torch.arange(20) % 4, rng, logits=torch.rand(20, 3, generator=rng))
    memory.add(ids(7), 4, ids(0), logits=torch.rand(1, 6, generator=rng))
    other.load_state_dict(memory.state_dict())
    for name in ("examples", "task", "group", "seen", "logits"):
        torch.testing.assert_close(getattr(other, name), getattr(memory, name), equal_nan=True, rtol=0, atol=0)
    assert int(other.seen) == 20
    # it continues as the original does
    for each in (memory, other):
        each.keep(ids(0, 2, 5))
        each.offer_reservoir(ids(50, 51, 52), 5, ids(1, 1, 1), generator("on"), logits=torch.ones(3, 8))
    torch.testing.assert_close(other.logits, memory.logits, equal_nan=True, rtol=0, atol=0)
    assert other.examples.tolist() == memory.examples.tolist()


def test_a_smaller_state_loads_into_a_filled_memory():
    memory, other = Memory(size=5), Memory(size=5)
    other.add(torch.arange(5), 0, torch.arange(5))
    memory.add(ids(3), 1, ids(2))
    other.load_state_dict(memory.state_dict())
    assert other.examples.tolist() == [3]
    other.load_state_dict(Memory(size=5).state_dict())
    assert len(other) == 0


def test_draws_are_uniform_over_slots_and_with_replacement():
    memory = Memory(size=5)
    memory.add(torch.arange(5), 0, torch.zeros(5, dtype=torch.int64))
    drawn = np.bincount(memory.draw(5000, generator("draw")).numpy(), minlength=5)
    assert np.abs(drawn - 1000).max() < 4.5 * math.sqrt(5000 * 0.2 * 0.8)
    assert len(memory.draw(50, generator("more"))) == 50  # more than the number of slots


def test_the_first_of_each_group_are_listed_in_their_order_and_nothing_is_dropped():
    memory = Memory()
    memory.add(ids(7, 3, 9), 0, ids(1, 1, 1))
    memory.add(ids(4), 1, ids(0))
    assert {group: examples.tolist() for group, examples in memory.first(2).items()} == {0: [4], 1: [7, 3]}
    assert len(memory) == 4
    assert Memory().first(3) == {}


@given(st.lists(st.integers(0, 4), max_size=30), st.integers(0, 1000))
@settings(max_examples=50, deadline=None)
def test_a_balanced_draw_has_as_many_distinct_rows_of_each_class_as_the_rarest_has(labels, seed):
    drawn = draw_balanced(torch.tensor(labels, dtype=torch.int64), torch.Generator().manual_seed(seed)).tolist()
    assert drawn == sorted(set(drawn))
    counts = Counter(labels)
    least = min(counts.values(), default=0)
    assert Counter(labels[i] for i in drawn) == dict.fromkeys(counts, least)


def test_every_row_of_a_class_is_as_likely_in_a_balanced_draw():
    labels = torch.tensor([0, 1, 0, 0, 1, 0])
    often = Counter(i for seed in range(4000) for i in draw_balanced(labels, generator(seed, "draw")).tolist())
    assert often[1] == often[4] == 4000
    for i in (0, 2, 3, 5):
        assert often[i] == pytest.approx(2000, abs=5 * math.sqrt(1000))
