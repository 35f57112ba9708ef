"""Byte-level tokenizers, to which the space before a word is a part of it, read the words of sentences as written."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tiny_encoders import save, tiny_model
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from torch import Tensor

import bace
from bace.config.parse import config_from
from bace.data.modalities.text import load_tokenizer
from bace.data.modalities.token import TOKEN, for_words
from bace.experiments.assemble import assemble
from bace.models.encoder import Encoder
from bace.serving.export import tokenizer as exported_tokenizer

SENTENCES = [["London", "and", "Paris", "."], ["Paris", "saw", "London's", "rain"], ["and", "\x00", "rain"]]
TAGS = [["B-city", "O", "B-city", "O"], ["B-city", "O", "B-city", "O"], ["O", "O", "B-water"]]
SPECIAL = {"cls_token": "<s>", "pad_token": "<pad>", "sep_token": "</s>", "unk_token": "<unk>"}


@pytest.fixture(scope="module", params=["roberta", "modernbert"])
def backbone(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """RoBERTa's class of tokenizers knows `add_prefix_space`; ModernBERT's, which also normalises, ignores it."""
    import transformers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=[*SPECIAL.values()], initial_alphabet=alphabet)
    made.train_from_iterator([" ".join(sentence) for sentence in SENTENCES * 5], trainer)
    made.post_processor = processors.TemplateProcessing("<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 2)])
    kind = transformers.RobertaTokenizerFast
    if request.param == "modernbert":
        kind, made.normalizer = transformers.PreTrainedTokenizerFast, normalizers.NFC()
    folder = tmp_path_factory.mktemp(request.param)
    kind(tokenizer_object=made, **SPECIAL).save_pretrained(folder)
    return save(tiny_model(request.param, vocab_size=300), folder)


def written(backbone: str, sentence: list[str]) -> tuple[list[int], list[int]]:
    """The ids of a sentence that is written with spaces, and where its words start, found by their offsets."""
    text = "".join(f" {word}" for word in sentence)
    encoded = load_tokenizer(backbone)(text, return_offsets_mapping=True)
    pieces = {start: i for i, (start, end) in reversed([*enumerate(encoded["offset_mapping"])]) if end > start}
    spaces = [place for place, letter in enumerate(text) if letter == " "]
    return encoded["input_ids"], [pieces.get(space, pieces.get(space + 1, -1)) for space in spaces]


def settings(backbone: str) -> dict[str, Any]:
    return {"backbone": backbone, "benchmark.max_length": 22}


@pytest.fixture
def passed(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The ids that pass an encoder."""
    found: list[Tensor] = []
    forward = Encoder.forward

    def watched(encoder: Encoder, inputs: dict[str, Tensor], *arguments: Any, **options: Any) -> Any:
        found.append(inputs["input_ids"])
        return forward(encoder, inputs, *arguments, **options)

    monkeypatch.setattr(Encoder, "forward", watched)
    return found


def test_words_of_a_run_are_those_of_the_written_sentence(backbone: str, tmp_path: Path) -> None:
    tagged = (zip(words, tags, strict=True) for words, tags in zip(SENTENCES, TAGS, strict=True))
    lines = ["\n".join(map(" ".join, sentence)) for sentence in tagged]
    for split in ("train", "test"):
        (tmp_path / f"{split}.conll").write_text("\n\n".join(lines) + "\n")
    given = {"benchmark": "my-entities", "benchmark.path": str(tmp_path), "method": "SEQ", **settings(backbone)}
    _, stream = assemble(config_from({**given, "benchmark.tasks": [1, 1]}))
    data: Any = stream.data
    shown = [data.ids[a:b].tolist() for a, b in zip(data.start, data.start[1:], strict=False)]
    starts = [data.positions[a:b].tolist() for a, b in zip(data.row_start, data.row_start[1:], strict=False)]
    for sentence in SENTENCES:
        assert written(backbone, sentence) in zip(shown, starts, strict=True)
    for example in range(len(shown)):  # a study shows the words
        for row in range(int(data.row_start[example]), int(data.row_start[example + 1])):
            seen = TOKEN.view(data, example, row, lambda: backbone)
            text, (begin, end) = seen["text"], seen["word"]
            assert text[begin:end] == text.split(" ")[row - int(data.row_start[example])]


def test_words_of_a_prediction_are_those_of_the_written_sentence(
    backbone: str, tmp_path: Path, passed: list[Tensor]
) -> None:
    """Also those of a learner that was saved, on a machine without the backbone, and of an exported model."""
    copied = tmp_path / "backbone"
    shutil.copytree(backbone, copied)
    learner = bace.Learner("SimpleCIL", **settings(str(copied))).partial_fit(SENTENCES[:2], TAGS[:2])
    tags = learner.predict(SENTENCES)
    learner.save(tmp_path / "saved")
    shutil.rmtree(copied)
    loaded = bace.Learner.load(tmp_path / "saved")
    for model in (learner, loaded):
        file = tokenizers.Tokenizer.from_str(exported_tokenizer(model)["tokenizer.json"])
        for sentence, expected in zip(SENTENCES, tags, strict=True):
            ids, starts = written(backbone, sentence)
            passed.clear()
            assert model.predict([sentence]) == [expected]
            assert [given.tolist() for given in passed] == [[ids]]
            encoded = file.encode(sentence, is_pretokenized=True)
            assert encoded.ids == ids
            assert [encoded.word_ids.index(word) for word in range(len(sentence))] == starts
    loaded.partial_fit(SENTENCES[2:], TAGS[2:])
    assert [written(backbone, SENTENCES[2])[0]] in [given.tolist() for given in passed]


def test_texts_are_read_as_they_are(backbone: str, passed: list[Tensor]) -> None:
    """Also after sentences of entities were read with the same backbone."""
    bace.Learner("SimpleCIL", **settings(backbone)).partial_fit(SENTENCES, TAGS)
    learner = bace.Learner("SimpleCIL", **settings(backbone)).partial_fit(["London", "rain"], ["city", "water"])
    passed.clear()
    learner.predict(["London and Paris"])
    assert [given.tolist() for given in passed] == [load_tokenizer(backbone)(["London and Paris"])["input_ids"]]
    assert load_tokenizer(backbone).tokenize("London and") == ["London", "Ġand"]


def test_byte_level_tokenizers_are_also_found_behind_other_rules(backbone: str) -> None:
    """A rule that splits a word, here at digits, adds no space inside the word."""
    tokenizer = load_tokenizer(backbone)
    behind = for_words(tokenizer)  # a copy
    behind.backend_tokenizer.normalizer = tokenizer.backend_tokenizer.normalizer
    rules = [pre_tokenizers.Digits(), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    behind.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(rules)
    found = for_words(behind)([["rain", "and4"]], is_split_into_words=True, add_special_tokens=False)
    assert found.tokens(0) == behind.tokenize(" rain and4")
    assert found.word_ids(0).count(1) == 2


def test_other_tokenizers_do_not_change(tiny: Any) -> None:
    tokenizer = load_tokenizer(tiny.bert)
    assert for_words(tokenizer) is tokenizer
