"""The stream: what it serves, what it refuses, and how it assembles batches."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bace.core.stream import BUCKET, Stream, Task
from bace.data.batch import NO_IDS, Batch
from bace.data.modalities.image import Images
from bace.data.modalities.text import Texts, flat
from bace.data.modalities.token import Entities
from bace.errors import DataError, StreamRefused

# Three tasks have two classes with ten examples each: six to train on, one to validate, three to test.
# Example e belongs to task e // 10; its class is 2 * task + e % 2.


def ids(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def ten_each(classes: list[range]) -> list[Task]:
    return [
        Task(
            t,
            f"task {t + 1}",
            own,
            torch.arange(10 * t, 10 * t + 6),
            ids(10 * t + 6),
            torch.arange(10 * t + 7, 10 * t + 10),
        )
        for t, own in enumerate(classes)
    ]


def texts() -> Stream:
    """Text e is the token e + 100 repeated 2 + e % 4 times."""
    pieces = [torch.full((2 + e % 4,), e + 100) for e in range(30)]
    targets = torch.tensor([2 * (e // 10) + e % 2 for e in range(30)])
    return Stream(
        Texts(**flat(pieces), pad=0), targets, ten_each([range(0, 2), range(2, 4), range(4, 6)]), list("abcdef")
    )


def sentences() -> Stream:
    """Sentence e has 1 + e % 3 words; word w is at token position 1 + 2 w; its first word is a B-, the rest O."""
    words = [1 + e % 3 for e in range(30)]
    ids = flat([torch.full((2 * n + 2,), e + 100) for e, n in enumerate(words)])
    rows = flat([1 + 2 * torch.arange(n) for n in words])
    names = ["O", "B-x", "I-x", "B-y", "I-y", "B-z", "I-z"]
    targets = torch.tensor([(1 + 2 * (e // 10)) if w == 0 else 0 for e, n in enumerate(words) for w in range(n)])
    data = Entities(ids["ids"], ids["start"], rows["ids"], rows["start"])
    tasks = ten_each([range(0, 3), range(3, 5), range(5, 7)])
    return Stream(data, targets, tasks, names)


def row_ids(stream: Stream, example: int) -> list[int]:
    assert stream.data.row_start is not None
    return list(range(int(stream.data.row_start[example]), int(stream.data.row_start[example + 1])))


MAKERS = {"text": texts, "token": sentences}


# -- refusal


@pytest.mark.parametrize("modality", MAKERS)
@pytest.mark.parametrize(
    ("what", "example"),
    [("past training", 3), ("future training", 22), ("own test", 18), ("own validation", 16), ("future test", 29)],
)
def test_what_the_task_may_not_see_is_refused_through_every_door(modality, what, example):
    stream = MAKERS[modality]()
    stream.begin(stream[1], ids(0, 5))
    asked = ids(10, example)
    rows = asked if modality == "text" else torch.tensor([row_ids(stream, 10)[0], row_ids(stream, example)[0]])
    for door in (
        lambda: stream.batch(asked),
        lambda: stream.rows(rows),
        lambda: stream.labels(asked),
        lambda: stream.by_group(asked),
    ):
        with pytest.raises(StreamRefused, match=rf"refuses example {example} \(1 of 2 requested\).*licence"):
            door()


@pytest.mark.parametrize("modality", MAKERS)
def test_the_tasks_own_training_examples_and_the_memory_are_served(modality):
    stream = MAKERS[modality]()
    stream.begin(stream[1], ids(0, 5))
    asked = ids(15, 0, 10, 5, 5)
    assert stream.batch(asked).examples.tolist() == asked.tolist()
    assert len(stream.labels(asked)[0]) == len(stream.batch(asked))


def test_nothing_is_open_before_the_first_task_and_each_task_closes_the_last():
    stream = texts()
    with pytest.raises(StreamRefused):
        stream.batch(ids(0))
    for t in range(3):
        stream.begin(stream[t], NO_IDS)
        open_now = [e for e in range(30) if _served(stream, e)]
        assert open_now == list(range(10 * t, 10 * t + 6))


def test_a_licence_for_the_past_opens_earlier_training_data_and_nothing_else():
    stream = texts()
    stream.begin(stream[1], NO_IDS, past=True)
    assert [e for e in range(30) if _served(stream, e)] == [*range(6), *range(10, 16)]


def test_a_licence_holds_for_its_scope_and_its_examples_and_is_logged_once():
    stream = texts()
    stream.begin(stream[0], NO_IDS)
    for _ in range(2):
        with stream.licence("probing", ids(7, 8)):
            stream.batch(ids(0, 7, 8))
            with stream.licence("evaluation", ids(9)):
                stream.batch(ids(7, 9))
            with pytest.raises(StreamRefused):
                stream.batch(ids(9))
        with pytest.raises(StreamRefused):
            stream.batch(ids(7))
    assert stream.licences == ["probing", "evaluation"]


def test_a_licence_ends_with_an_error_inside_it_too():
    stream = texts()
    stream.begin(stream[0], NO_IDS)
    with pytest.raises(RuntimeError, match="inside"), stream.licence("probing", ids(7)):
        raise RuntimeError("inside")
    assert not _served(stream, 7)
    assert _served(stream, 0)


def _served(stream: Stream, example: int) -> bool:
    try:
        stream.batch(ids(example))
    except StreamRefused:
        return False
    return True


# -- reading


def test_a_batch_of_texts_is_padded_to_its_own_longest_and_rows_are_the_examples():
    stream = texts()
    stream.begin(stream[0], NO_IDS)
    batch = stream.batch(ids(4, 1))
    assert batch.inputs["input_ids"].tolist() == [[104, 104, 0], [101, 101, 101]]
    assert batch.inputs["attention_mask"].tolist() == [[1, 1, 0], [1, 1, 1]]
    assert batch.targets.tolist() == [0, 1]
    assert batch.rows.tolist() == batch.examples.tolist() == [4, 1]
    assert batch.at is None
    assert len(batch) == 2


def test_a_batch_without_inputs_says_which_examples_and_rows_it_has_and_is_refused_alike():
    stream = sentences()
    stream.begin(stream[0], NO_IDS)
    asked = stream[0].train[:2]
    full, bare = stream.batch(asked), stream.batch(asked, inputs=False)
    assert bare.inputs == {}
    assert full.inputs
    for name in ("targets", "examples", "rows", "at"):
        assert torch.equal(getattr(bare, name), getattr(full, name))
    with pytest.raises(StreamRefused):
        stream.batch(stream[1].train[:1], inputs=False)


def test_a_batch_of_sentences_has_a_row_for_each_word():
    stream = sentences()
    stream.begin(stream[0], NO_IDS)
    batch = stream.batch(ids(2, 0))  # three words, one word
    assert batch.rows.tolist() == [*row_ids(stream, 2), *row_ids(stream, 0)] == [3, 4, 5, 0]
    assert batch.at is not None
    assert batch.at.tolist() == [[0, 1], [0, 3], [0, 5], [1, 1]]
    assert batch.targets.tolist() == [1, 0, 0, 1]
    assert batch.examples.tolist() == [2, 0]


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_rows_of_sentences_are_exactly_those_asked_for_and_each_sentence_is_passed_once(data):
    stream = sentences()
    stream.begin(stream[1], ids(0, 2, 5))
    allowed = [r for e in (0, 2, 5, *range(10, 16)) for r in row_ids(stream, e)]
    asked = data.draw(st.lists(st.sampled_from(allowed), min_size=1, max_size=20))
    batch = stream.rows(torch.tensor(asked))
    assert batch.rows.tolist() == asked  # in the given order, including repeats
    assert len(set(batch.examples.tolist())) == len(batch.examples)
    owner = [next(e for e in range(30) if r in row_ids(stream, e)) for r in asked]
    assert sorted(set(owner)) == sorted(batch.examples.tolist())
    assert len(batch.inputs["input_ids"]) == len(batch.examples)
    assert batch.targets.tolist() == stream.targets[asked].tolist()
    assert batch.at is not None
    for (at_example, at_token), e, r in zip(batch.at.tolist(), owner, asked, strict=True):
        assert int(batch.examples[at_example]) == e
        assert batch.inputs["input_ids"][at_example, 0] == e + 100  # the passed sentence is that of the owner
        assert at_token == 1 + 2 * row_ids(stream, e).index(r)


def test_by_group_lists_the_examples_that_show_each_class_or_type_in_their_order():
    stream = texts()
    stream.begin(stream[1], ids(3))
    found = stream.by_group(ids(13, 10, 3, 11, 12))
    assert {g: e.tolist() for g, e in found.items()} == {1: [3], 2: [10, 12], 3: [13, 11]}
    stream = sentences()
    stream.begin(stream[1], ids(3))
    found = stream.by_group(ids(13, 3, 10))
    assert {g: e.tolist() for g, e in found.items()} == {0: [3], 1: [13, 10]}  # groups are types; O has no group


def test_group_of_names_one_group_for_each_example():
    stream = texts()
    stream.begin(stream[1], ids(1))
    assert stream.group_of(ids(10, 1, 11, 10)).tolist() == [2, 1, 3, 2]
    with pytest.raises(StreamRefused):
        stream.group_of(ids(2))


def test_a_sentence_stands_for_the_rarest_type_it_shows_and_for_none_if_it_shows_none():
    """The words by sentence are x y | x | O | x y z | y y. Three of the five show x, three show y, and one shows z."""
    tags = [[1, 3], [1], [0], [1, 4, 5], [3, 3]]
    rows = flat([1 + torch.arange(len(words)) for words in tags])
    tokens = flat([torch.zeros(len(words) + 2, dtype=torch.int64) for words in tags])
    data = Entities(tokens["ids"], tokens["start"], rows["ids"], rows["start"])
    names = ["O", "B-x", "I-x", "B-y", "I-y", "B-z", "I-z"]
    task = Task(0, "all", range(7), torch.arange(5), NO_IDS, NO_IDS)
    stream = Stream(data, torch.tensor([c for words in tags for c in words]), [task], names)
    stream.begin(task, NO_IDS)
    assert stream.group_of(torch.arange(5)).tolist() == [1, 0, -1, 2, 1]  # a tie goes to the later type
    assert stream.group_of(ids(4, 0)).tolist() == [1, 0]  # of these two, y is shown twice and x once


def test_every_row_of_a_batch_knows_its_example():
    stream = sentences()
    stream.begin(stream[0], NO_IDS)
    assert stream.batch(ids(2, 0, 1)).owner.tolist() == [0, 0, 0, 1, 2, 2]  # three, one and two words
    both = Batch.cat(stream.batch(ids(1)), stream.batch(ids(1)))
    assert both.owner.tolist() == [0, 0, 1, 1]
    stream = texts()
    stream.begin(stream[0], NO_IDS)
    assert stream.batch(ids(3, 1)).owner.tolist() == [0, 1]


def test_groups_are_classes_or_entity_types():
    assert texts().groups.tolist() == [0, 1, 2, 3, 4, 5]
    assert sentences().groups.tolist() == [-1, 0, 0, 1, 1, 2, 2]


def test_the_stream_is_a_sequence_of_its_tasks():
    stream = texts()
    assert len(stream) == 3
    assert [task.index for task in stream] == [0, 1, 2]
    assert [task.name for task in stream[1:]] == ["task 2", "task 3"]
    assert stream[-1].classes == range(4, 6)


def test_classes_must_be_numbered_in_order_of_arrival():
    with pytest.raises(DataError, match="'task 2' starts at class 3, expected 2"):
        Stream(texts().data, texts().targets, ten_each([range(0, 2), range(3, 4), range(4, 6)]), list("abcdef"))


# -- batches


def test_cat_pads_texts_and_shifts_the_examples_of_the_second():
    stream = sentences()
    stream.begin(stream[0], NO_IDS)
    first, second = stream.batch(ids(0, 1)), stream.batch(ids(2, 3))
    both = Batch.cat(first, second)
    assert both.inputs["input_ids"].shape == (4, 8)
    assert both.inputs["input_ids"][:2, :6].tolist() == first.inputs["input_ids"].tolist()
    assert both.inputs["attention_mask"].tolist() == [
        [1] * 4 + [0] * 4, [1] * 6 + [0] * 2, [1] * 8, [1] * 4 + [0] * 4
    ]  # fmt: skip
    assert both.rows.tolist() == [*first.rows.tolist(), *second.rows.tolist()]
    assert both.targets.tolist() == [*first.targets.tolist(), *second.targets.tolist()]
    assert both.examples.tolist() == [0, 1, 2, 3]
    assert both.at is not None
    assert both.at.tolist() == [[0, 1], [1, 1], [1, 3], [2, 1], [2, 3], [2, 5], [3, 1]]
    for (example, _), row in zip(both.at.tolist(), both.rows.tolist(), strict=True):
        assert row in row_ids(stream, int(both.examples[example]))
    reverse = Batch.cat(second, first)  # the longer one first
    assert reverse.inputs["input_ids"].shape == (4, 8)
    assert reverse.inputs["attention_mask"].sum() == both.inputs["attention_mask"].sum()


def test_cat_of_three_batches_equals_one_batch_of_all():
    stream = sentences()
    stream.begin(stream[0], NO_IDS)
    parts = [stream.batch(part) for part in (ids(5, 1), ids(2), ids(0, 3, 4))]
    *_, together = itertools.accumulate(parts, Batch.cat)
    whole = stream.batch(ids(5, 1, 2, 0, 3, 4))
    assert torch.equal(together.at, whole.at)  # type: ignore[arg-type]
    assert torch.equal(together.rows, whole.rows)
    mask = whole.inputs["attention_mask"]
    assert torch.equal(together.inputs["attention_mask"], mask)
    assert torch.equal(together.inputs["input_ids"] * mask, whole.inputs["input_ids"] * mask)


def test_cat_with_nothing_is_the_batch_itself():
    stream = texts()
    stream.begin(stream[0], NO_IDS)
    batch = stream.batch(ids(0))
    assert Batch.cat(batch, None) is batch


def test_cat_of_pictures_stacks_them():
    data = Images(torch.arange(6 * 16, dtype=torch.uint8).view(6, 1, 4, 4), size=4)
    stream = Stream(
        data, torch.tensor([0, 1, 0, 1, 0, 1]), [Task(0, "t", range(2), torch.arange(6), NO_IDS, NO_IDS)], ["a", "b"]
    )
    stream.begin(stream[0], NO_IDS)
    both = Batch.cat(stream.batch(ids(4)), stream.batch(ids(1, 2)))
    torch.testing.assert_close(both.inputs["pixel_values"], stream.batch(ids(4, 1, 2)).inputs["pixel_values"])
    assert both.targets.tolist() == [0, 1, 0]
    assert both.at is None


# -- batches of similar lengths


@pytest.mark.parametrize("modality", MAKERS)
@given(asked=st.lists(st.integers(0, 29), max_size=30), size=st.integers(1, 12))
@settings(max_examples=40, deadline=None)
def test_parts_hold_every_example_longest_first_and_their_rows_are_put_back_in_order(modality, asked, size):
    stream = MAKERS[modality]()
    examples = ids(*asked)
    parts, in_order = stream.bucketed(examples, size)
    assert [len(part) for part in parts] == [len(part) for part in examples.split(size)]
    assert sorted(torch.cat(list(parts)).tolist()) == sorted(asked)
    if len(asked) > size:
        lengths = stream.data.lengths[torch.cat(list(parts))].tolist()
        assert lengths == sorted(lengths, reverse=True)
    rows = torch.cat([stream.rows_of(part)[0] for part in parts])
    assert torch.equal(in_order(rows), stream.rows_of(examples)[0])
    assert torch.equal(in_order(torch.stack([rows, -rows], 1))[:, 1], -stream.rows_of(examples)[0])


def test_parts_of_pictures_are_the_pictures_in_their_order():
    stream = Stream(
        Images(torch.zeros(9, 3, 4, 4, dtype=torch.uint8), size=4), torch.zeros(9, dtype=torch.int64), [], []
    )
    examples = ids(4, 1, 8, 0, 7)
    parts, in_order = stream.bucketed(examples, 2)
    assert [part.tolist() for part in parts] == [[4, 1], [8, 0], [7]]
    assert torch.equal(in_order(examples), examples)
    straight, asked = (
        stream.shuffled(examples, 2, torch.Generator().manual_seed(0), bucketing=bucketing)
        for bucketing in (False, True)
    )
    assert [part.tolist() for part in straight] == [part.tolist() for part in asked]


def of_lengths(lengths: list[int]) -> Stream:
    texts = Texts(**flat([torch.ones(n, dtype=torch.int64) for n in lengths]))
    return Stream(texts, torch.zeros(len(lengths), dtype=torch.int64), [], [])


@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=60), size=st.integers(1, 9), seed=st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_bucketed_training_batches_are_runs_of_one_sorted_window(lengths, size, seed):
    stream, examples = of_lengths(lengths), torch.arange(len(lengths))

    def batches(bucketing):
        return stream.shuffled(examples, size, torch.Generator().manual_seed(seed), bucketing=bucketing)

    made = batches(True)
    assert [batch.tolist() for batch in made] == [batch.tolist() for batch in batches(True)]  # the generator decides
    assert sorted(torch.cat(made).tolist()) == examples.tolist()
    assert len(made) == len(batches(False)) == -(-len(lengths) // size)
    short = [batch for batch in made if len(batch) < size]
    assert [len(batch) for batch in short] == ([len(lengths) % size] if len(lengths) % size else [])
    if len(lengths) // size <= BUCKET:  # full batches are sorted together
        full = sorted(sorted(stream.data.lengths[batch].tolist()) for batch in made if len(batch) == size)
        together = [n for batch in full for n in batch]
        assert together == sorted(together)


def test_bucketing_saves_padding_and_leaves_no_order_by_length():
    rng = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 100, (2000,), generator=rng)
    stream, examples = of_lengths(lengths.tolist()), torch.arange(2000)

    def padded(batches):
        return sum(len(batch) * int(lengths[batch].max()) for batch in batches)

    plain, bucketed = (
        stream.shuffled(examples, 8, torch.Generator().manual_seed(1), bucketing=bucketing)
        for bucketing in (False, True)
    )
    assert padded(plain) > 1.7 * int(lengths.sum())  # the longest of 8 is 8/9 of 100 on average, the mean is a half
    assert padded(bucketed) < 1.05 * int(lengths.sum())
    longest = torch.tensor([float(lengths[batch].max()) for batch in bucketed])
    assert abs(float(torch.corrcoef(torch.stack([longest[1:], longest[:-1]]))[0, 1])) < 0.3  # of successive batches
    again = stream.shuffled(examples, 8, torch.Generator().manual_seed(2), bucketing=True)
    assert {tuple(batch.tolist()) for batch in again}.isdisjoint(tuple(batch.tolist()) for batch in bucketed)


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_rows_picked_from_a_batch_are_those_the_stream_would_serve(data):
    stream = data.draw(st.sampled_from([texts, sentences]))()
    stream.begin(stream[0], NO_IDS)
    batch = stream.batch(ids(0, 1, 2, 3, 5))
    rows = torch.tensor(data.draw(st.lists(st.integers(0, len(batch) - 1), min_size=1, max_size=6)))
    picked, served = batch.pick(rows), stream.rows(batch.rows[rows])
    for name in ("targets", "examples", "rows", "at"):
        one, other = getattr(picked, name), getattr(served, name)
        assert (one is None and other is None) or torch.equal(one, other)
    assert picked.inputs.keys() == served.inputs.keys()
    assert all(torch.equal(value, served.inputs[key]) for key, value in picked.inputs.items())


def test_picked_pictures_come_in_the_order_asked():
    data = Images(torch.arange(6 * 16, dtype=torch.uint8).view(6, 1, 4, 4), size=4)
    stream = Stream(data, torch.arange(6), [Task(0, "t", range(6), torch.arange(6), NO_IDS, NO_IDS)], list("abcdef"))
    stream.begin(stream[0], NO_IDS)
    picked = stream.batch(ids(5, 4, 3, 2)).pick(ids(3, 0))
    assert picked.examples.tolist() == picked.targets.tolist() == [2, 5]
    assert torch.equal(picked.inputs["pixel_values"], stream.batch(ids(2, 5)).inputs["pixel_values"])
