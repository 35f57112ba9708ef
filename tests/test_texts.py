"""Texts and sentences as tokens: padding, masks, word positions, windows."""

import itertools

import pytest
import torch
from conftest import WORDS
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from bace.data.modalities.text import Texts, flat, load_tokenizer, tokenize_texts
from bace.data.modalities.token import Entities, Span, joined, spans, split_words, tokenize_sentences
from bace.errors import ConfigError, DataError
from bace.models.backbones import backbone_path

CPU = torch.device("cpu")
PAD, UNK, CLS, SEP = 0, 1, 2, 3


def word(i: int) -> int:
    """The id of WORDS[i] in the tiny tokenizer."""
    return 4 + i


PLURAL = 4 + len(WORDS)  # "##s"


@pytest.fixture(scope="module")
def tokenizer(tiny):
    return load_tokenizer(tiny.bert)


@pytest.fixture(scope="module")
def minilm():
    try:
        return load_tokenizer(str(backbone_path("minilm")))
    except ConfigError:
        pytest.skip("the MiniLM package is not installed")


def ids_of(data: Texts, example: int) -> list[int]:
    return data.ids[data.start[example] : data.start[example + 1]].tolist()


def positions_of(data: Entities, example: int) -> list[int]:
    return data.positions[data.row_start[example] : data.row_start[example + 1]].tolist()


# -- texts


def test_texts_are_padded_to_the_longest_of_the_batch_and_masked(tokenizer):
    texts = tokenize_texts(["w0 w1 w2 w3", "w5", "w6s w7"], tokenizer, 128)
    batch = texts.inputs(torch.tensor([1, 2]), None, CPU)
    assert batch["input_ids"].tolist() == [
        [CLS, word(5), SEP, PAD, PAD],
        [CLS, word(6), PLURAL, word(7), SEP],
    ]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]
    alone = texts.inputs(torch.tensor([1]), None, CPU)
    assert alone["input_ids"].tolist() == [[CLS, word(5), SEP]]


def test_padding_uses_the_tokenizers_own_id():
    texts = Texts(**flat([torch.tensor([5, 6, 7]), torch.tensor([8])]), pad=9)
    batch = texts.inputs(torch.tensor([0, 1]), None, CPU)
    assert batch["input_ids"].tolist() == [[5, 6, 7], [8, 9, 9]]


def test_every_view_of_a_text_is_the_clean_one(tokenizer):
    texts = tokenize_texts(["w0 w1", "w2"], tokenizer, 128)
    for key in (0, 5):
        assert torch.equal(
            texts.inputs(torch.tensor([0, 1]), key, CPU)["input_ids"],
            texts.inputs(torch.tensor([0, 1]), None, CPU)["input_ids"],
        )


def test_long_texts_are_cut_and_keep_both_special_tokens(tokenizer):
    texts = tokenize_texts([" ".join(WORDS[:20]), "w1"], tokenizer, 8)
    assert ids_of(texts, 0) == [CLS, *(word(i) for i in range(6)), SEP]
    assert ids_of(texts, 1) == [CLS, word(1), SEP]


def test_an_empty_text_is_only_its_special_tokens(tokenizer):
    assert ids_of(tokenize_texts(["", "w1"], tokenizer, 8), 0) == [CLS, SEP]


def test_unknown_words_become_the_unknown_token(tokenizer):
    assert ids_of(tokenize_texts(["w0 xyzzy"], tokenizer, 8), 0) == [CLS, word(0), UNK, SEP]


@given(st.lists(st.lists(st.integers(1, 50), max_size=6), min_size=1, max_size=8), st.data())
@settings(max_examples=50, deadline=None)
def test_a_padded_batch_holds_exactly_the_texts(lists, data):
    texts = Texts(**flat([torch.tensor(ids, dtype=torch.int64) for ids in lists]))
    assert len(texts) == len(lists)
    asked = data.draw(st.lists(st.integers(0, len(lists) - 1), min_size=1, max_size=10))
    batch = texts.inputs(torch.tensor(asked), None, CPU)
    assert batch["input_ids"].shape[1] == max(len(lists[e]) for e in asked)
    for row, mask, example in zip(batch["input_ids"], batch["attention_mask"], asked, strict=True):
        assert row[mask.bool()].tolist() == lists[example]
        assert mask.tolist() == sorted(mask.tolist(), reverse=True)  # padding on the right
        assert not row[~mask.bool()].any()


@given(
    st.lists(st.lists(st.integers(1, 50), max_size=4), min_size=1, max_size=5),
    st.lists(st.lists(st.integers(1, 50), max_size=4), min_size=1, max_size=5),
    st.data(),
)
@settings(max_examples=30, deadline=None)
def test_taken_texts_come_first_when_they_are_prepended(old, new, data):
    taken = data.draw(st.lists(st.integers(0, len(old) - 1), max_size=5))
    first, second = (Texts(**flat([torch.tensor(t, dtype=torch.int64) for t in lists])) for lists in (old, new))
    second.prepend(first.take(torch.tensor(taken, dtype=torch.int64)))
    assert [ids_of(second, e) for e in range(len(second))] == [old[i] for i in taken] + new


# -- sentences


def test_words_are_read_at_their_first_piece(tokenizer):
    data, pieces = tokenize_sentences([["w1", "w2s", "w3"], ["w4s", "w5s"]], tokenizer, 128)
    assert ids_of(data, 0) == [CLS, word(1), word(2), PLURAL, word(3), SEP]
    assert positions_of(data, 0) == [1, 2, 4]
    assert ids_of(data, 1) == [CLS, word(4), PLURAL, word(5), PLURAL, SEP]
    assert positions_of(data, 1) == [1, 3]
    assert pieces == [range(0, 1), range(1, 2)]
    assert data.modality.name == "token"


def test_a_word_that_the_tokenizer_drops_becomes_unknown(tokenizer):
    """The tiny tokenizer splits at white space, so a word of white space has no piece."""
    data, _ = tokenize_sentences([["w1", " ", "w2"], [" "]], tokenizer, 128)
    assert ids_of(data, 0) == [CLS, word(1), UNK, word(2), SEP]
    assert positions_of(data, 0) == [1, 2, 3]
    assert ids_of(data, 1) == [CLS, UNK, SEP]


def check_windows(data: Entities, pieces: list[range], sentences: list[list[str]], tokenizer, max_length: int) -> None:
    """Special tokens frame every window, no window is too long, and together they hold every word in order."""
    lead, tail = tokenizer.cls_token_id, tokenizer.sep_token_id
    assert [len(p) >= 1 for p in pieces] == [True] * len(sentences)
    assert [e for p in pieces for e in p] == list(range(len(data)))
    for sentence, examples in zip(sentences, pieces, strict=True):
        expected = []  # the pieces of each word, tokenised alone
        for one in sentence:
            own = tokenizer([one], is_split_into_words=True, add_special_tokens=False)["input_ids"]
            expected.append((own or [tokenizer.unk_token_id])[: max_length - 2])
        found = []
        for e in examples:
            ids, at = ids_of(data, e), positions_of(data, e)
            assert len(ids) <= max_length
            assert (ids[0], ids[-1]) == (lead, tail)
            assert at
            assert at[0] == 1
            found += [ids[start:end] for start, end in zip(at, [*at[1:], len(ids) - 1], strict=True)]
        assert found == expected


@given(
    st.lists(
        st.lists(st.sampled_from(["w1", "w2s", "w3ss", "w4sss", "very", "?", "\u200b", " "]), min_size=1, max_size=25),
        min_size=1,
        max_size=4,
    ),
    st.integers(3, 12),
)
@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_windows_of_long_sentences_lose_no_word(tokenizer, sentences, max_length):
    data, pieces = tokenize_sentences(sentences, tokenizer, max_length)
    check_windows(data, pieces, sentences, tokenizer, max_length)


def test_a_sentence_that_just_fits_is_one_window_and_one_word_more_makes_two(tokenizer):
    data, pieces = tokenize_sentences([["w1", "w2s", "w3"], ["w1", "w2s", "w3", "w4"]], tokenizer, 6)
    assert pieces == [range(0, 1), range(1, 3)]
    assert ids_of(data, 2) == [CLS, word(4), SEP]


def test_a_word_longer_than_the_window_is_cut_and_keeps_its_row(tokenizer):
    data, pieces = tokenize_sentences([["w1", "w2ssssss", "w3"]], tokenizer, 5)
    assert pieces == [range(0, 3)]
    assert ids_of(data, 1) == [CLS, word(2), PLURAL, PLURAL, SEP]
    assert [positions_of(data, e) for e in range(3)] == [[1], [1], [1]]


@pytest.mark.parametrize("max_length", [0, 1, 2])
def test_a_length_without_room_for_a_word_is_refused(tokenizer, max_length):
    with pytest.raises(ConfigError, match=f"max_length {max_length}.*at least 3"):
        tokenize_sentences([["w1"]], tokenizer, max_length)


def test_no_sentence_is_an_error(tokenizer):
    with pytest.raises(DataError, match="no sentence"):
        tokenize_sentences([], tokenizer, 8)


def test_taken_sentences_come_first_when_they_are_prepended_with_their_words(tokenizer):
    old, _ = tokenize_sentences([["w1", "w2s"], ["w3"], ["w4s", "w5", "w6"]], tokenizer, 16)
    new, _ = tokenize_sentences([["w7"], ["w8s", "w9"]], tokenizer, 16)
    expected = [(ids_of(d, e), positions_of(d, e)) for d, e in ((old, 2), (old, 0), (new, 0), (new, 1))]
    new.prepend(old.take(torch.tensor([2, 0])))
    assert [(ids_of(new, e), positions_of(new, e)) for e in range(len(new))] == expected


# -- words and entities in their text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Angela Merkel visited Paris.", "Angela|Merkel|visited|Paris|."),
        ('the U.S. army (in the U.S.), J. Smith\'s "dog"', 'the|U.S.|army|(|in|the|U.S.|)|,|J.|Smith\'s|"|dog|"'),
        ("a , b . ( c )", "a|,|b|.|(|c|)"),  # already split
        (":) ... '' @user #tag 3.5. don't", ":)|...|''|@user|#tag|3.5|.|don't"),
        ("«Où?» “Là!”", "«|Où|?|»|“|Là|!|”"),
        ("  x\t\ny  ", "x|y"),
        (" \n", ""),
    ],
)
def test_a_text_is_split_into_words_as_corpora_are(text, words):
    assert "|".join(text[start:end] for start, end in split_words(text)) == words


@given(st.text(max_size=60) | st.text(alphabet="aB. ,'(\"!)", max_size=60))
@settings(max_examples=150, deadline=None)
def test_words_of_a_text_are_in_order_and_hold_all_but_white_space(text):
    words = split_words(text)
    assert all(start < end for start, end in words)
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(words))
    assert "".join(text[start:end] for start, end in words) == "".join(text.split())
    pieces = [text[start:end] for start, end in words]
    again, offsets = joined(pieces)
    assert [again[start:end] for start, end in offsets] == pieces
    assert again == " ".join(pieces)


def test_spans_are_what_the_strict_reading_of_the_tags_marks_in_the_text():
    text = "Ms Ada Lovelace met  Babbage."
    words = split_words(text)
    tags = ["O", "B-person", "I-person", "I-place", "B-person", "O"]  # I-place continues nothing
    assert spans(text, words, tags) == [Span(3, 15, "person", "Ada Lovelace"), Span(21, 28, "person", "Babbage")]
    assert spans(text, words, ["O"] * 6) == []
    assert spans("", [], []) == []


# -- a tokenizer that lacks what is needed


def test_a_folder_without_a_tokenizer_says_which_files_are_missing(tiny):
    with pytest.raises(ConfigError, match=r"tokenizer.json"):
        load_tokenizer(tiny.vit)


# -- the real tokenizer


def test_minilm_reads_words_at_their_first_piece(minilm):
    sentence = ["Angela", "Merkel", "visited", "Constantinople", ",", "unbelievably", "!"]
    data, _ = tokenize_sentences([sentence], minilm, 128)
    first: list[int] = []
    at = 1
    for one in sentence:
        first.append(at)
        at += len(minilm.tokenize(one))
    assert positions_of(data, 0) == first
    assert any(b - a > 1 for a, b in itertools.pairwise(first))  # some words have several pieces
    ids = ids_of(data, 0)
    assert (ids[0], ids[-1], len(ids)) == (minilm.cls_token_id, minilm.sep_token_id, at + 1)
    assert minilm.decode(ids[1:-1]) == "angela merkel visited constantinople, unbelievably!"


@given(st.lists(st.text(min_size=1, max_size=12).filter(lambda s: "[" not in s), min_size=1, max_size=30))
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_minilm_loses_no_word_whatever_its_characters(minilm, sentence):
    data, pieces = tokenize_sentences([sentence], minilm, 12)
    check_windows(data, pieces, [sentence], minilm, 12)


def test_minilm_drops_control_characters_and_they_become_unknown(minilm):
    data, _ = tokenize_sentences([["good", "\u200b", "\x00", "day"]], minilm, 128)
    assert len(positions_of(data, 0)) == 4
    ids: list[int] = ids_of(data, 0)
    assert [ids[p] for p in positions_of(data, 0)][1:3] == [minilm.unk_token_id] * 2


def test_minilm_texts_are_cut_with_both_special_tokens(minilm):
    texts = tokenize_texts(["the quick brown fox " * 20, "a fox"], minilm, 16)
    batch: dict[str, Tensor] = texts.inputs(torch.tensor([1, 0]), None, CPU)
    assert batch["input_ids"].shape == (2, 16)
    assert batch["input_ids"][:, 0].tolist() == [minilm.cls_token_id] * 2
    assert batch["input_ids"][1, -1] == minilm.sep_token_id
    assert batch["attention_mask"].sum(1).tolist() == [4, 16]
    assert minilm.decode(batch["input_ids"][0], skip_special_tokens=True) == "a fox"
