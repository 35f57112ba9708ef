"""The cost of texts relative to a loop written by hand with transformers and PyTorch, and the gain of batches of
similar lengths.

MiniLM (pip install "bace-cil[text]") reads texts of random words, with lengths distributed as in news and
encyclopaedias. Both sides get the same texts in the same batches, alternating in one process on one thread. The fastest
of several repetitions counts for every step. Training is a second task (batches of 16 for SEQ, of 8 new and 8 old for
ER). Prediction goes from strings to class names, including tokenisation. Tokens are counted without padding.

    python benchmarks/text.py [--repeat N] [--examples N] [--json]
"""

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from common import CLASSES, Bar, Mark, begun, ignore, least, second_epoch, step_times
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from bace.config.schema import Config, Training
from bace.core.method import Method
from bace.core.stream import Stream
from bace.data.modalities.text import load_tokenizer, tokenize_texts
from bace.learner import Learner
from bace.models.backbones import backbone_path
from bace.models.heads import CosineHead
from bace.models.loading import load_encoder
from bace.models.model import Model

BATCH, LONGEST, MEMORY, EVAL_BATCH = 16, 128, 50, 32
LR, HEAD_LR = 3e-5, 1e-3


def some_texts(count: int) -> list[str]:
    """Texts of 3 to 120 common words, most of them short."""
    rng = torch.Generator().manual_seed(0)
    vocabulary = load_tokenizer(str(backbone_path("minilm"))).get_vocab()
    words = sorted(word for word in vocabulary if word.isalpha() and word.isascii() and len(word) > 2)
    lengths = torch.randn(count, generator=rng).mul(0.6).add(3).exp().clamp(3, 120).int()  # log-normal, median 20
    return [" ".join(words[i] for i in torch.randint(len(words), (n,), generator=rng)) for n in lengths.tolist()]


def ready(method: str, examples: int, bucketing: bool = False) -> tuple[Method, Stream, Config]:
    """A method before its second task of this many texts."""
    texts = tokenize_texts(some_texts(2 * examples), load_tokenizer(str(backbone_path("minilm"))), LONGEST)
    encoder = load_encoder("minilm")
    training = Training(
        epochs=1, batch_size=BATCH, optimiser="adamw", lr=LR, head_lr=HEAD_LR, threads=1, bucketing=bucketing
    )
    return begun(method, texts, Model(encoder, CosineHead(encoder.width)), training, MEMORY)


def steps(method: str, examples: int) -> list[tuple[Tensor, Tensor]]:
    """The new and the old examples of each step of the library's training."""
    learned, stream, _ = ready(method, examples)
    now = learned.now
    now.task, now.stage = 1, learned.stages(stream[1])[0].name
    new = stream.shuffled(stream[1].train, learned.stages(stream[1])[0].batch_size, now.rng("order"), bucketing=False)
    old = []
    for now.step in range(len(new)):
        old.append(learned.memory.examples[learned.replayed_slots()] if learned.replay_size else new[0][:0])
    return list(zip(new, old, strict=True))


def framework(method: str, examples: int, bucketing: bool = False) -> Callable[[Mark], None]:
    return second_epoch(*ready(method, examples, bucketing))


class Bare:
    """transformers' BERT and a cosine head."""

    def __init__(self, classes: int) -> None:
        from transformers import AutoModel

        self.encoder = AutoModel.from_pretrained(backbone_path("minilm"), add_pooling_layer=False)
        self.weight = torch.randn(classes, self.encoder.config.hidden_size).requires_grad_()
        self.sigma = torch.tensor(10.0, requires_grad=True)

    def __call__(self, texts: list[Tensor]) -> Tensor:  # token ids of each text -> (texts, classes)
        ids = pad_sequence(texts, batch_first=True)
        mask = pad_sequence([torch.ones_like(text) for text in texts], batch_first=True)
        features = self.encoder(input_ids=ids, attention_mask=mask).last_hidden_state[:, 0]
        return self.sigma * F.linear(F.normalize(features, dim=1), F.normalize(self.weight, dim=1))


def bare(method: str, examples: int) -> Callable[[Mark], None]:
    """The same training by hand."""
    _, stream, _ = ready(method, examples)
    texts: Any = stream.data
    ids, targets = list(texts.ids.split(texts.lengths.tolist())), stream.targets
    network = Bare(2 * CLASSES)
    network.encoder.train()
    optimiser = torch.optim.AdamW(
        [
            {"params": network.encoder.parameters()},
            {"params": [network.weight, network.sigma], "lr": HEAD_LR},
        ],
        lr=LR,
        weight_decay=0.0,
        fused=True,
    )
    batches = steps(method, examples)

    def epoch(mark: Mark) -> None:
        for new, old in batches:
            both = torch.cat([new, old])
            logits = network([ids[i] for i in both.tolist()])
            loss = F.cross_entropy(logits[: len(new)], targets[new])
            if len(old):
                loss = loss + F.cross_entropy(logits[len(new) :], targets[old])
            optimiser.zero_grad(set_to_none=True)
            loss.backward()
            optimiser.step()
            mark()

    return epoch


def prediction(examples: int, repeat: int) -> dict[str, float]:
    """Prediction from strings to class names: by the library, by hand, and by the library without sorting by
    length."""
    texts = some_texts(examples)
    settings = {"backbone": "minilm", "memory": 0, "train.eval_batch_size": EVAL_BATCH, "train.threads": 1}
    settings |= {"train.epochs": 1, "train.lr": 0.0}
    learner = Learner("seq", **settings).partial_fit(texts[:CLASSES], list(range(CLASSES)))
    network = Bare(CLASSES)
    network.encoder.eval()
    tokenizer = load_tokenizer(str(backbone_path("minilm")))
    names = learner.classes_

    def by_hand(ordered: bool = True) -> list[int]:
        tokens = tokenizer(texts, truncation=True, max_length=LONGEST)["input_ids"]
        order = sorted(range(len(texts)), key=lambda i: -len(tokens[i])) if ordered else list(range(len(texts)))
        found: dict[int, int] = {}
        with torch.inference_mode():
            for start in range(0, len(texts), EVAL_BATCH):
                part = order[start : start + EVAL_BATCH]
                best = network([torch.tensor(tokens[i]) for i in part]).argmax(1).tolist()
                found.update((i, names[c]) for i, c in zip(part, best, strict=True))
        return [found[i] for i in range(len(texts))]

    ours, theirs, unsorted = [], [], []
    for _ in range(repeat):
        ours.append(seconds(lambda: learner.predict(texts)))
        theirs.append(seconds(by_hand))
        unsorted.append(seconds(lambda: by_hand(ordered=False)))
    tokens = sum(map(len, tokenizer(texts, truncation=True, max_length=LONGEST)["input_ids"]))
    return compared(min(ours), min(theirs), tokens) | {"bucketing_gain": min(unsorted) / min(theirs)}


def seconds(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def compared(ours: float, theirs: float, tokens: int) -> dict[str, float]:
    rates = {"tokens_per_second": tokens / ours, "bare_tokens_per_second": tokens / theirs}
    return {"ratio": ours / theirs, "seconds": ours, "bare_seconds": theirs, **rates}


def training(method: str, examples: int, repeat: int) -> dict[str, float]:
    ours, theirs, bucketed = [], [], []
    for _ in range(repeat):
        ours.append(step_times(framework(method, examples)))
        theirs.append(step_times(bare(method, examples)))
        bucketed.append(step_times(framework(method, examples, bucketing=True)))
    lengths: Any = ready(method, examples)[1].data.lengths
    tokens = sum(int(lengths[torch.cat(batch)].sum()) for batch in steps(method, examples))
    return compared(least(ours), least(theirs), tokens) | {"bucketing_gain": least(ours) / least(bucketed)}


def bars(tiny: bool) -> dict[str, Bar]:
    examples, repeat = (BATCH, 1) if tiny else (64, 3)
    found = {f"texts over a bare loop, {m}": Bar(training(m, examples, repeat)["ratio"], 1.05) for m in ("SEQ", "ER")}
    return found | {"prediction of texts over a loop by hand": Bar(prediction(2 * examples, repeat)["ratio"], 1.05)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--examples", type=int, default=64, help="training texts; prediction takes twice as many")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    from transformers.utils import logging

    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    for side in (framework, bare):  # the first to run allocates the memory that all later ones reuse
        side("SEQ", BATCH)(ignore)
    result = {f"training {method}": training(method, options.examples, options.repeat) for method in ("SEQ", "ER")}
    result["prediction"] = prediction(2 * options.examples, options.repeat)
    if options.json:
        print(json.dumps(result))
        return
    print("tokens per second, the library and a loop by hand (fastest of", options.repeat, "for each step)")
    for name, r in result.items():
        print(
            f"  {name:12} {r['tokens_per_second']:7.0f} / {r['bare_tokens_per_second']:7.0f}   seconds "
            f"{r['seconds']:.2f} / {r['bare_seconds']:.2f} = {r['ratio']:.3f}   "
            f"similar lengths: {r['bucketing_gain']:.2f} times as fast"
        )


if __name__ == "__main__":
    main()
